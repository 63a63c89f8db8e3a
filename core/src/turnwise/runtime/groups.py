"""The group reward of a run: collects the episodes of each call, and asks the reward here or in a reward worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from attrs import define, evolve, field
from structlog.contextvars import bound_contextvars

from turnwise.episode.containment import ContainedTask
from turnwise.episode.driver import call_reward
from turnwise.events.dispatch import Observers
from turnwise.options import GroupOptions
from turnwise.protocols.reward import GroupCall, GroupKey, GroupReward
from turnwise.record.ended import EndedEpisode
from turnwise.record.result import EpisodeResult
from turnwise.record.spec import EpisodeSpec, UnfinishedEpisode
from turnwise.runtime.feed import EpisodeFeed
from turnwise.runtime.interface import Runtime
from turnwise.runtime.remote.reward_pool import RewardPool
from turnwise.runtime.worker import Deliver
from turnwise.types import Fault, Status

_HELD: Final = Fault(
    owner="infra",
    kind="GroupInterrupted",
    message="the episode has ended, but its group was interrupted; the group is scored when all members have ended",
)


@define(eq=False)
class GroupScoring:
    """
    Scores the groups of a run, in reward workers or, if `pool` is None, in this process.

    The manager sets `stage`, which counts a score as a wait of the run.
    """

    reward: GroupReward
    label: str
    sizes: GroupOptions
    observers: Observers
    grace_s: float
    pool: RewardPool | None = None
    stage: Callable[[str], AbstractContextManager[None]] = field(default=lambda _name: nullcontext(), init=False)
    _emit_finished: Callable[[object], None] = field(init=False)

    def __attrs_post_init__(self) -> None:
        # Observers receive the event after the scoring and not before.
        self._emit_finished = self.observers.hold("on_episode_finished")

    async def run(self, runtime: Runtime, feed: EpisodeFeed, deliver: Deliver, interrupt: asyncio.Event) -> None:
        """
        Run a feed as `Runtime.run` does, and deliver each episode when its group is scored.

        All members of an interrupted group are delivered as unfinished, also the ended ones: a part of a group gets no
        score, and the call that resumes the group has all members.
        """

        def num_members(key: GroupKey) -> int:
            # The episodes of a group may be submitted one by one.
            size = self.sizes.validation_n if key[2] else self.sizes.n
            return max(feed.num_members[key], 0 if feed.closed else size)

        def put(number: int, result: EpisodeResult) -> None:
            self._emit_finished(result)
            deliver(number, result)

        def hold(number: int, result: EpisodeResult) -> None:
            unfinished = EndedEpisode(spec=self._spec_of(result), result=result)
            put(number, evolve(result, status=Status.ABORTED, fault=_HELD, scores=(), unfinished=unfinished))

        call = GroupCall(label=self.label, num_members=num_members, put=put, hold=hold, ask=self._ask)
        async with self.reward.collect(call) as add:
            feed.deliver_ended(add)
            await runtime.run(feed, add, interrupt)

    def reopen(
        self, ended: Iterable[EpisodeResult], unfinished: Iterable[UnfinishedEpisode]
    ) -> tuple[list[EpisodeResult], list[UnfinishedEpisode]]:
        """
        Take back the ended episodes of groups that continue, so that the whole group is scored when it is resumed.

        Trainings and rollouts call it with the episodes of their files. The files have such a group only if the run was
        killed, failed members run again, or the earlier run had another group reward or none.

        Returns:
            The ended episodes of other groups, and the unfinished episodes with the ones taken back.
        """
        resumed = list(unfinished)
        continuing = {each.spec.group for each in resumed}
        whole: list[EpisodeResult] = []
        for result in ended:
            spec = self._spec_of(result)
            if spec.group not in continuing:
                whole.append(result)
            elif (before := self.reward.unscored(result)) is None:
                resumed.append(UnfinishedEpisode(spec=spec, started=False))
            else:
                resumed.append(EndedEpisode(spec=spec, result=before))
        return whole, resumed

    def _spec_of(self, result: EpisodeResult) -> EpisodeSpec:
        return EpisodeSpec(
            task=result.task,
            agent_name=result.agent_name,
            rollout_n=result.rollout_n,
            global_step=result.global_step,
            validation=result.validation,
            seed=self.sizes.seed,
            sampling=self.sizes.validation_sampling if result.validation else self.sizes.sampling,
        )

    async def _ask(self, episodes: Sequence[EpisodeResult], seconds: float) -> object:
        with self.stage(self.label):
            if self.pool is None:
                with bound_contextvars(keys=[each.key for each in episodes]):  # as in a reward worker, for its lines
                    code = call_reward(self.reward.score_group, episodes)
                    return await ContainedTask(code, "reward", self.label, self.grace_s).wait(seconds)
            # The reward worker has the deadline: the time in which it scores other groups does not count.
            scores = self.pool.score_group(episodes, seconds)
            return await ContainedTask(scores, "reward", self.label, self.grace_s).wait()
