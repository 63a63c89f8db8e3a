"""
Rolls out while the trainer trains, for the mode `async`.

A thread keeps tasks in flight and puts finished episodes into the buffer (`producer`). The trainer takes whole groups
and updates the engine's weights in the middle of episodes. The number of groups in flight, in the buffer and in
training is bounded by ``(max_staleness + 1) * tasks_per_step`` (AReaL, arXiv:2505.24298). So groups that finish in the
order in which they started are never too stale; the buffer drops a group that too many later ones have overtaken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import structlog
from attrs import define, field

from turnwise import EpisodeResult, RolloutManager, UnfinishedEpisode
from turnwise.errors import TurnwiseError
from turnwise_grpo_trainer.config import TrainConfig
from turnwise_grpo_trainer.loop.interrupts import Interrupt
from turnwise_rollout_buffer import BufferClosedError, EpisodeGroup, TrajectoryBuffer
from turnwise_rollout_buffer.groups import GroupKey
from turnwise_rollout_buffer.producer import GroupProducer
from turnwise_rollout_buffer.task_stream import TaskStream

_POLL_S: Final = 0.2
"""How often `collect` checks for an interrupt."""
_REMEMBERED: Final = 4096
"""Groups that were taken and are remembered."""


@define(eq=False)
class AsyncCollector:
    """
    A `GroupSource` that takes groups of a `GroupProducer`.

    Attributes:
        producer: rolls out in its own thread.
        buffer: where the producer puts episodes.
        train: the `train` section.
        interrupt: ends `collect` early.
    """

    producer: GroupProducer
    buffer: TrajectoryBuffer
    train: TrainConfig
    interrupt: Interrupt
    stage: str = field(default="wait", init=False)
    # Value of the buffer's count `dropped_uniform` at the start of the current step.
    _uniform_before: int = field(default=0, init=False)
    # The step that took each of the last groups, by name.
    _taken: dict[GroupKey, int] = field(factory=dict, init=False)

    @classmethod
    def create(
        cls,
        manager: RolloutManager,
        stream: TaskStream,
        buffer: TrajectoryBuffer,
        train: TrainConfig,
        interrupt: Interrupt,
        on_episode: Callable[[EpisodeResult], None],
    ) -> AsyncCollector:
        """Create the collector with its producer; `running` starts it."""
        limit = (train.buffer.max_staleness + 1) * train.tasks_per_step
        producer = GroupProducer(manager, stream, buffer, limit, train.tasks_per_step, on_episode)
        collector = cls(producer, buffer, train, interrupt)
        collector._reset_uniform_limit()
        return collector

    @contextmanager
    def running(self) -> Iterator[None]:
        self.producer.start()
        try:
            yield
        finally:
            self.producer.stop()
        if self.producer.failure is not None:
            raise self.producer.failure

    def collect(self, step: int) -> list[EpisodeGroup]:
        """Wait for the groups of a step; a step never waits for more tasks than mode `sync` would request."""
        while True:
            self.interrupt.check()
            try:
                groups = self.buffer.take(
                    self.train.tasks_per_step, timeout_s=_POLL_S, uniform_limit=self.producer.uniform_limit
                )
            except TimeoutError:
                continue
            except BufferClosedError:
                failure = self.producer.failure
                raise failure or RuntimeError("the rollout thread has ended") from failure
            dropped = self._reset_uniform_limit()
            self.producer.oldest_step = step
            self._check_new(groups, step)
            if len(groups) < self.train.tasks_per_step:
                structlog.get_logger().warning(
                    "step has fewer groups, because the others had no reward variance",
                    step=step,
                    groups=len(groups),
                    dropped_uniform=dropped,
                )
            self.producer.notify()
            return groups

    def _check_new(self, groups: Sequence[EpisodeGroup], step: int) -> None:
        """Raise an error for a group that was taken before: equal names have equal seeds, so it would count twice."""
        for group in groups:
            uid, for_step, _validation = group.key
            if (earlier := self._taken.get(group.key)) is not None:
                raise TurnwiseError(
                    f"step {step} got the group of task {uid!r} for step {for_step}, which step {earlier} has"
                    " trained on already; this is a bug of turnwise: resume from the last checkpoint and report it"
                )
            self._taken[group.key] = step
        while len(self._taken) > _REMEMBERED:
            del self._taken[next(iter(self._taken))]

    def _reset_uniform_limit(self) -> int:
        """Start a new count of groups dropped for lack of variance; return the old count."""
        before, self._uniform_before = self._uniform_before, self.buffer.counts["dropped_uniform"]
        allowed = (1 + self.train.buffer.max_refills) * self.train.tasks_per_step
        self.producer.uniform_limit = self._uniform_before + allowed
        return self._uniform_before - before

    def notify(self) -> None:
        self.producer.notify()

    def interrupt_soon(self) -> None:
        self.producer.interrupt_soon()

    def paused(self) -> AbstractContextManager[None]:
        return self.producer.paused()

    @property
    def unfinished(self) -> tuple[UnfinishedEpisode, ...]:
        return self.producer.unfinished

    def load_partial(self, unfinished: Sequence[UnfinishedEpisode]) -> None:
        self.producer.load_partial(unfinished)

    def undo_collect(self) -> None:
        """Do nothing: other groups have taken the place of these in the buffer, so these are not trained on."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "stream": self.producer.stream.state_dict(),
            "launched": self.producer.launched,
            "launched_for": [[step, list(uids)] for step, uids in self.producer.launched_for.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, step: int) -> None:
        self.producer.stream.load_state_dict(state["stream"])
        # A checkpoint of mode `sync` has no such count; there, every step launches `tasks_per_step` groups.
        self.producer.launched = state.get("launched", step * self.train.tasks_per_step)
        # A checkpoint of mode `sync` in the middle of a step has the tasks of this step in `order`.
        launched = {each: list(uids) for each, uids in state.get("launched_for", ())}
        launched[step + 1] = [*launched.get(step + 1, ()), *state.get("order", ())]
        self.producer.launched_for = launched
        self.producer.oldest_step = step + 1
        self._reset_uniform_limit()
