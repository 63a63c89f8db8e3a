"""
Rolling out and training at the same time.

A thread keeps tasks in flight and puts finished episodes into the buffer (`producer`); the trainer takes whole groups
and brings new weights to the engine in the middle of episodes. No more groups are on their way, waiting or being learnt
from than the trainer can take before they are too old: ``(max_staleness + 1) * tasks_per_step`` (AReaL,
arXiv:2505.24298). So groups that end in the order in which they were begun are never too old; the buffer drops one
that later groups have overtaken for too long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import structlog
from attrs import define, field

from turnwise import UnfinishedEpisode
from turnwise_grpo_trainer.buffer import BufferClosedError, EpisodeGroup
from turnwise_grpo_trainer.loop import TrainLoop
from turnwise_grpo_trainer.producer import GroupProducer

_LONGEST_WAIT_S: Final = 0.2
"""Between two looks for an interrupt."""


@define(eq=False)
class AsyncLoop(TrainLoop):
    """The loop of mode `async`."""

    _producer: GroupProducer = field(init=False)
    # Groups without variance that were dropped before the groups of this step were waited for.
    _uniform_before: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        """Prepare the rollout; it begins with the first step."""
        train = self.setup.train
        self._producer = GroupProducer(
            self.manager,
            self.stream,
            self.buffer,
            limit=(train.buffer.max_staleness + 1) * train.tasks_per_step,
            tasks_per_step=train.tasks_per_step,
            seen=self.view.episode,
        )
        self._count_uniform()

    def train(self) -> None:
        """Make the steps that are left, while the rollout goes on."""
        self._producer.start()
        try:
            while self.step < self.setup.train.num_steps:
                stages, started = self.begin_step()
                with stages.timed("wait"):
                    groups = self._take()
                self.learn(groups, stages, started)
                self._producer.look_again()
        finally:
            self._producer.stop()
        if self._producer.failure is not None:
            raise self._producer.failure

    def interrupt(self) -> None:
        """Stop soon; may be called from a signal handler."""
        self._producer.hold_soon()
        super().interrupt()

    def _take(self) -> list[EpisodeGroup]:
        """
        Wait for the groups of a step.

        They are fewer, or none, once as many were dropped for no variance as `sync` would ask for at most.
        """
        train = self.setup.train
        while True:
            self.stop_if_interrupted()
            try:
                groups = self.buffer.take(
                    train.tasks_per_step, timeout_s=_LONGEST_WAIT_S, until_uniform=self._producer.until_uniform
                )
            except TimeoutError:
                continue
            except BufferClosedError:
                failure = self._producer.failure
                raise failure or RuntimeError("the rollout has ended") from failure
            dropped = self._count_uniform()
            if len(groups) < train.tasks_per_step:
                structlog.get_logger().warning(
                    "a step goes on with fewer groups, since others had no variance",
                    step=self.step + 1,
                    groups=len(groups),
                    dropped_uniform=dropped,
                )
            self._producer.look_again()
            return groups

    def _count_uniform(self) -> int:
        """Begin to count the groups that are dropped for no variance anew; return how many there were."""
        before, self._uniform_before = self._uniform_before, self.buffer.counts["dropped_uniform"]
        train = self.setup.train
        self._producer.until_uniform = self._uniform_before + (1 + train.buffer.max_refills) * train.tasks_per_step
        return self._uniform_before - before

    # A restart

    def save(self) -> None:
        """Write a checkpoint; groups that are on their way are cut for it, and go on afterwards."""
        with self._producer.held():
            super().save()

    @property
    def unfinished(self) -> tuple[UnfinishedEpisode, ...]:
        """Episodes that were cut; what had finished of their groups is in the buffer."""
        return self._producer.unfinished

    def go_on_with(self, unfinished: Sequence[UnfinishedEpisode]) -> None:
        """Take episodes that were cut when a checkpoint was written."""
        self._producer.go_on_with(unfinished)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {**super().state_dict(), "launched": self._producer.launched}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where `state_dict` was called, also in another mode."""
        super().load_state_dict(state)
        self._count_uniform()
        self._producer.launched = state.get("launched", self.step * self.setup.train.tasks_per_step)
