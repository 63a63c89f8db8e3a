"""The group reward of a run: collects the episodes of each call, and asks the reward here or in a reward worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from attrs import define, field
from structlog.contextvars import bound_contextvars

from turnwise.episode.containment import ContainedTask
from turnwise.episode.driver import call_reward
from turnwise.events.dispatch import Observers
from turnwise.options import GroupOptions
from turnwise.protocols.reward import GroupCall, GroupKey, GroupReward
from turnwise.record.result import EpisodeResult
from turnwise.runtime.feed import EpisodeFeed
from turnwise.runtime.interface import Runtime
from turnwise.runtime.remote.reward_pool import RewardPool
from turnwise.runtime.worker import Deliver


@define(eq=False)
class GroupScoring:
    """Scores the groups of a run, in reward workers or, if `pool` is None, in this process."""

    reward: GroupReward
    label: str
    sizes: GroupOptions
    observers: Observers
    grace_s: float
    pool: RewardPool | None = None
    _emit_finished: Callable[[object], None] = field(init=False)

    def __attrs_post_init__(self) -> None:
        # Observers receive the event after the scoring and not before.
        self._emit_finished = self.observers.hold("on_episode_finished")

    async def run(self, runtime: Runtime, feed: EpisodeFeed, deliver: Deliver, interrupt: asyncio.Event) -> None:
        """Run a feed as `Runtime.run` does, and deliver each episode when its group is scored."""

        def num_members(key: GroupKey) -> int:
            # The episodes of a group may be submitted one by one.
            size = self.sizes.validation_n if key[2] else self.sizes.n
            return max(feed.num_members[key], 0 if feed.closed else size)

        def put(number: int, result: EpisodeResult) -> None:
            self._emit_finished(result)
            deliver(number, result)

        call = GroupCall(label=self.label, num_members=num_members, put=put, ask=self._ask)
        async with self.reward.collect(call) as add:
            await runtime.run(feed, add, interrupt)

    async def _ask(self, episodes: Sequence[EpisodeResult], seconds: float) -> object:
        if self.pool is None:
            with bound_contextvars(keys=[each.key for each in episodes]):  # as in a reward worker, for its log lines
                code = call_reward(self.reward.score_group, episodes)
                return await ContainedTask(code, "reward", self.label, self.grace_s).wait(seconds)
        # The reward worker has the deadline: the time in which it scores other groups does not count.
        return await ContainedTask(self.pool.score_group(episodes, seconds), "reward", self.label, self.grace_s).wait()
