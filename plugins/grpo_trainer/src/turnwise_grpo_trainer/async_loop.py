"""
Rolling out and training at the same time.

A thread keeps tasks in flight and puts finished groups into the buffer; the trainer takes them and brings new weights
to the engine in the middle of episodes. No more groups are on their way than the trainer can take before they are too
old: ``(max_staleness + 1) * tasks_per_step`` (AReaL, arXiv:2505.24298). The buffer drops what is too old all the same,
as when an episode took long.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from attrs import define, field

from turnwise import EpisodeResult, Task
from turnwise_grpo_trainer.buffer import BufferClosedError, EpisodeGroup
from turnwise_grpo_trainer.loop import TrainLoop


@define(eq=False)
class AsyncLoop(TrainLoop):
    """The loop of mode `async`."""

    _underway: dict[str, Task] = field(factory=dict, init=False)
    _launched: int = field(default=0, init=False)
    _again: list[str] = field(factory=list, init=False)
    _room: threading.Condition = field(factory=threading.Condition, init=False)
    _stopping: bool = field(default=False, init=False)
    _failure: BaseException | None = field(default=None, init=False)

    def run(self) -> None:
        """Train until the last step."""
        if not self.step:
            self.validate()
        producer = threading.Thread(target=self._produce, name="turnwise-rollout", daemon=True)
        producer.start()
        try:
            while self.step < self.setup.train.num_steps:
                stages, started = self.begin_step()
                with stages.timed("wait"):
                    groups = self._take()
                self.learn(groups, stages, started)
                self._make_room()
        finally:
            self._stop()
            producer.join()
        if self._failure is not None:
            raise self._failure

    def _take(self) -> list[EpisodeGroup]:
        try:
            groups = self.buffer.take(self.setup.train.tasks_per_step)
        except BufferClosedError:
            raise self._failure or RuntimeError("the rollout has ended") from self._failure
        self._make_room()
        return groups

    def _stop(self) -> None:
        with self._room:
            self._stopping = True
            self._room.notify_all()
        self.buffer.close()
        self.manager.abort()

    def _make_room(self) -> None:
        with self._room:
            self._room.notify_all()

    # The thread that rolls out

    @property
    def limit(self) -> int:
        """Groups that may be on their way or wait."""
        train = self.setup.train
        return min((train.buffer.max_staleness + 1) * train.tasks_per_step, self.buffer.max_groups)

    def _produce(self) -> None:
        try:
            asyncio.run(self._launch())
        except BufferClosedError:
            pass
        except BaseException as error:  # noqa: BLE001 - the trainer's thread raises it
            self._failure = error
            self.buffer.close()

    async def _launch(self) -> None:
        async with asyncio.TaskGroup() as group:
            while await asyncio.to_thread(self._wait_for_room):
                task = self._next_task()
                group.create_task(self._roll_out(task, 1 + self._launched // self.setup.train.tasks_per_step))
                self._launched += 1

    def _wait_for_room(self) -> bool:
        """Wait until another group may start; False when none may any more."""
        with self._room:
            while not self._stopping and len(self._underway) + len(self.buffer) >= self.limit:
                self._room.wait()
            return not self._stopping

    def _next_task(self) -> Task:
        with self._room:
            known = {task.uid: task for task in self.setup.tasks}
            if self._again:
                task = known[self._again.pop(0)]
            else:
                # A task that is on its way is not begun again, so that groups do not mix.
                task = self.stream.take(1, without=self._underway)[0]
            self._underway[task.uid] = task
            return task

    async def _roll_out(self, task: Task, step: int) -> None:
        episodes: list[EpisodeResult] = []
        async for episode in self.manager.stream([task], global_step=step):
            episodes.append(episode)
            self.view.episode(episode)
        if not self._stopping:
            await asyncio.to_thread(self._deliver, task, episodes)

    def _deliver(self, task: Task, episodes: list[EpisodeResult]) -> None:
        try:
            for episode in episodes:
                self.buffer.put(episode)
        finally:
            with self._room:
                self._underway.pop(task.uid, None)
                self._room.notify_all()

    # A restart

    def state_dict(self) -> dict[str, Any]:
        """Return plain values; groups that are on their way begin anew."""
        with self._room:
            return {**super().state_dict(), "launched": self._launched, "underway": sorted(self._underway)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where `state_dict` was called."""
        super().load_state_dict(state)
        self._launched, self._again = state["launched"], list(state["underway"])
        self.buffer.drop_partial()
