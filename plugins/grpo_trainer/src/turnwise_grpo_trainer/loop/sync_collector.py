"""Rolls out the groups of a step while the trainer waits, for the mode `sync`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from attrs import define, field

from turnwise import EpisodeResult, RolloutManager, Task, UnfinishedEpisode
from turnwise_grpo_trainer.config import TrainConfig
from turnwise_grpo_trainer.loop.interrupts import Interrupt
from turnwise_rollout_buffer import EpisodeGroup, TrajectoryBuffer
from turnwise_rollout_buffer.task_stream import TaskStream


@define(eq=False)
class SyncCollector:
    """
    A `GroupSource` that rolls out inside `collect`.

    Attributes:
        manager: started.
        stream: the tasks.
        buffer: collects episodes to groups.
        train: the `train` section.
        interrupt: ends `collect` early.
        on_episode: called with every finished episode.
    """

    manager: RolloutManager
    stream: TaskStream
    buffer: TrajectoryBuffer
    train: TrainConfig
    interrupt: Interrupt
    on_episode: Callable[[EpisodeResult], None]
    stage: str = field(default="rollout", init=False)
    # State of the step in progress: the rank of each task by uid, how often tasks were requested, interrupted episodes.
    _order: dict[str, int] = field(factory=dict, init=False)
    _num_requests: int = field(default=0, init=False)
    # Tasks that mode `async` launched for later steps before its checkpoint; their names are taken.
    _launched_for: dict[int, list[str]] = field(factory=dict, init=False)
    _unfinished: list[UnfinishedEpisode] = field(factory=list, init=False)
    # State, buffer and interrupted episodes before the last `collect`.
    _before: tuple[dict[str, Any], dict[str, Any], tuple[UnfinishedEpisode, ...]] | None = field(
        default=None, init=False
    )

    @contextmanager
    def running(self) -> Iterator[None]:
        yield

    def collect(self, step: int) -> list[EpisodeGroup]:
        """Roll out the groups of a step, and resume interrupted episodes; return the groups in task order."""
        self._before = (self.state_dict(), self.buffer.state_dict(), self.unfinished)
        while self._unfinished and len(self.buffer) < self.train.tasks_per_step:
            self._roll_out([], step, self._take_unfinished())
        buffer = self.train.buffer
        max_requests = 1 + (buffer.max_refills if buffer.dynamic_sampling else 0)
        while self._num_requests < max_requests:
            self.interrupt.check()
            missing = self.train.tasks_per_step - len(self.buffer)
            used = {*self._order, *self._launched_for.get(step, ())}
            tasks = self.stream.take(missing, without=used) if missing > 0 else []
            if not tasks:
                break
            self._num_requests += 1
            self._order |= {task.uid: len(self._order) + rank for rank, task in enumerate(tasks)}
            self._roll_out(tasks, step)
        groups = self.buffer.take(min(self.train.tasks_per_step, len(self.buffer)))
        order, self._order, self._num_requests = self._order, {}, 0
        for uid in order:
            self.buffer.discard((uid, step, False))  # a group stays incomplete if the prompt policy dropped its task
        # Groups are in the order in which they finished, which depends on timing. Task order is reproducible.
        return sorted(groups, key=lambda group: order.get(group.episodes[0].task.uid, -1))

    def _take_unfinished(self) -> list[UnfinishedEpisode]:
        """
        Remove and return the interrupted episodes of the oldest groups for which the buffer has room.

        A checkpoint of mode `async` may have more. `put` would wait for room in the only thread that takes groups.
        """
        room = self.buffer.max_groups - len(self.buffer)
        groups = list(dict.fromkeys(map(_group_of, self._unfinished)))[:room]
        taken = [each for each in self._unfinished if _group_of(each) in groups]
        self._unfinished = [each for each in self._unfinished if _group_of(each) not in groups]
        return taken

    def _roll_out(self, tasks: Sequence[Task], step: int, resume: Sequence[UnfinishedEpisode] = ()) -> None:
        """Put the episodes of some tasks into the buffer; keep the episodes that an interrupt left unfinished."""
        unfinished: list[UnfinishedEpisode] = []
        for episode in self.manager.iterate(tasks, global_step=step, resume=tuple(resume)):
            if self.interrupt.requested and episode.unfinished is not None:
                unfinished.append(episode.unfinished)
            else:
                self.buffer.put(episode)
                self.on_episode(episode)
        self._unfinished = [*unfinished, *self._unfinished]
        self.interrupt.check()

    def undo_collect(self) -> None:
        """Return to the state before `collect`: a resumed training rolls out the same tasks with the same seeds."""
        if self._before is not None:
            state, buffer, unfinished = self._before
            self.load_state_dict(state, step=0)
            self.buffer.load_state_dict(buffer)
            self.load_partial(unfinished)

    def notify(self) -> None:
        """Do nothing: `collect` looks for room itself."""

    def interrupt_soon(self) -> None:
        """Do nothing: `interrupt` says it already."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do nothing: no episode runs outside of `collect`."""
        yield

    @property
    def unfinished(self) -> tuple[UnfinishedEpisode, ...]:
        return tuple(self._unfinished)

    def load_partial(self, unfinished: Sequence[UnfinishedEpisode]) -> None:
        self._unfinished = list(unfinished)

    def state_dict(self) -> dict[str, Any]:
        return {
            "stream": self.stream.state_dict(),
            "order": dict(self._order),
            "num_requests": self._num_requests,
            "launched_for": [[step, list(uids)] for step, uids in self._launched_for.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, step: int) -> None:
        self.stream.load_state_dict(state["stream"])
        # A checkpoint of mode `async` has neither: its groups belong to no particular step.
        self._order, self._num_requests = dict(state.get("order", {})), state.get("num_requests", 0)
        self._launched_for = {each: uids for each, uids in state.get("launched_for", ()) if each > step}


def _group_of(each: UnfinishedEpisode) -> tuple[str, int]:
    return each.spec.task.uid, each.spec.global_step
