"""
Requirements of every group reward, as plain functions without pytest.

A check takes a `GroupRewardProbe` and raises `AssertionError` with a text that describes the failure. The episodes are
run by the real driver, whose scripted model writes the answers of the examples; they reach the reward as in a run. Not
covered: whether a reward is right, beyond the values that examples give.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from math import inf
from typing import Any

from attrs import evolve, field, frozen

from turnwise.episode.driver import call_reward
from turnwise.errors import boundary
from turnwise.protocols import Chat, Episode, GroupCall, GroupReward
from turnwise.record.result import EpisodeResult
from turnwise.types import Fault, Score, Status, Task, TrajectoryScore
from turnwise_testing.checks.check import register
from turnwise_testing.checks.part import PartChecks, chat_resources
from turnwise_testing.checks.reward import USUAL, RewardExample, RewardProbe
from turnwise_testing.probes.agent import make_task, probe_chat
from turnwise_testing.probes.engine import expect, expect_equal


@frozen(kw_only=True)
class GroupExample:
    """
    Answers of the model to one task.

    Attributes:
        answers: text of the only turn of each episode.
        rewards: scores of the episodes from the run's `reward`, one for each answer; empty for a run without one.
        ground_truth: of the task.
        task: of the episodes; the probe's default unless given.
        expected: the scores of the group; None when the example does not say.
    """

    answers: tuple[str, ...]
    rewards: tuple[float, ...] = ()
    ground_truth: Any = None
    task: Task = field(factory=make_task)
    expected: tuple[float, ...] | None = None


@frozen
class _Given:
    """The reward of an episode that an example gives."""

    value: float

    def score(self, episode: Episode) -> Sequence[Score]:
        return (TrajectoryScore(value=self.value),)


@frozen(kw_only=True)
class GroupRewardProbe:
    """
    The probe of a group reward.

    Attributes:
        make_reward: builds it, as the registered factory does.
        examples: at least one.
        chat: how answers become tokens.
        tolerance: how far a score may be from the expected one.
    """

    make_reward: Callable[[], GroupReward]
    examples: tuple[GroupExample, ...]
    chat: Chat = field(factory=probe_chat)
    tolerance: float = 1e-6

    async def score(
        self, example: GroupExample, reward: GroupReward | None = None, *, failed: int = -1
    ) -> list[EpisodeResult]:
        """Return the scored episodes of an example; the one with the number `failed` has failed before."""
        episodes = [await self._episode(example, number) for number in range(len(example.answers))]
        if failed >= 0:
            fault = Fault(owner="infra", kind="InfrastructureError", message="as the check wants")
            episodes[failed] = evolve(episodes[failed], status=Status.FAILED, fault=fault, scores=())
        scored = await collected(reward or self.make_reward(), episodes)
        for episode in (each for number, each in enumerate(scored) if number != failed):
            fault_of = episode.fault
            text = f"{fault_of.owner} {fault_of.kind}: {fault_of.message}\n{fault_of.traceback}" if fault_of else ""
            expect(episode.reward is not None, f"scoring the answers {example.answers!r} failed: {text}")
        return scored

    async def _episode(self, example: GroupExample, number: int) -> EpisodeResult:
        given = _Given(example.rewards[number] if example.rewards else 0.0)
        single = RewardExample(answer=example.answers[number], ground_truth=example.ground_truth, task=example.task)
        result = await RewardProbe(make_reward=lambda: given, examples=(), chat=self.chat).score(single)
        return evolve(result, rollout_n=number, scores=result.scores if example.rewards else ())


async def collected(reward: GroupReward, episodes: Sequence[EpisodeResult]) -> list[EpisodeResult]:
    """Return the episodes of one group as a run delivers them, in their order."""
    delivered: dict[int, EpisodeResult] = {}

    async def ask(shown: Sequence[EpisodeResult], _seconds: float) -> object:
        # The time limit of the check is the only one: its error says which promise the reward does not keep.
        with boundary("reward", "score_group"):
            return await call_reward(reward.score_group, shown)

    put = delivered.__setitem__
    call = GroupCall(label="it", num_members=lambda _key: len(episodes), put=put, hold=put, ask=ask)
    async with reward.collect(call) as add:
        for number, episode in enumerate(episodes):
            add(number, episode)
    return [delivered[number] for number in range(len(episodes))]


GroupRewardCheck = Callable[[GroupRewardProbe], Coroutine[Any, Any, None]]

_USUAL = tuple(
    GroupExample(answers=tuple(example.answer for example in USUAL), rewards=rewards, ground_truth="42")
    for rewards in ((1.0, 0.0, 0.0), (1.0,) * 3)
)
GROUP_REWARD_CHECKS: dict[str, GroupRewardCheck] = {}
"""Every check by the name of its function without `check_`."""
GROUP_REWARDS = PartChecks(
    checks=GROUP_REWARD_CHECKS,
    probe=lambda part: GroupRewardProbe(make_reward=part.make, examples=part.examples, chat=part.chat),
    resources=chat_resources,
    examples="GroupExamples",
    usual=_USUAL,
)


_check = register(GROUP_REWARD_CHECKS)


@_check
async def check_fulfils_the_protocol(probe: GroupRewardProbe) -> None:
    """The factory returns something with the methods of a group reward."""
    text = "it is no GroupReward: derive it from turnwise_rollout_buffer.GroupReward"
    expect(isinstance(probe.make_reward(), GroupReward), text)


@_check
async def check_returns_a_score_for_each_episode(probe: GroupRewardProbe) -> None:
    """Every example has one finite score for each episode, and the reward changes nothing else of it."""
    expect(bool(probe.examples), "give the probe examples")
    for example in probe.examples:
        for scored in await probe.score(example):
            expect_equal(len(scored.scores), len(scored.trajectories), "scores of an episode")


@_check
async def check_expected_values(probe: GroupRewardProbe) -> None:
    """Examples with expected scores get these scores."""
    for example in probe.examples:
        scored = await probe.score(example)
        for answer, result, value in zip(example.answers, scored, example.expected or (), strict=False):
            close = abs((result.reward if result.reward is not None else inf) - value) <= probe.tolerance
            expect(close, f"answer {answer!r}: expected {value}, got {result.reward}")


@_check
async def check_is_repeatable(probe: GroupRewardProbe) -> None:
    """The same group has the same scores, in any order of groups, from one object or from several."""
    reward = probe.make_reward()
    first = [_rewards(await probe.score(example, reward)) for example in probe.examples]
    again = [_rewards(await probe.score(example, reward)) for example in reversed(probe.examples)]
    expect_equal(again[::-1], first, "scores of the same groups again")
    new = [_rewards(await probe.score(example)) for example in probe.examples]
    expect_equal(new, first, "scores of the same groups by new objects")


@_check
async def check_many_at_once_do_not_mix(probe: GroupRewardProbe) -> None:
    """One object scores many groups at once, each as it does alone."""
    reward = probe.make_reward()
    alone = [_rewards(await probe.score(example, reward)) for example in probe.examples]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(probe.score(example, reward)) for example in [*probe.examples] * 4]
    expect_equal([_rewards(task.result()) for task in tasks], alone * 4, "scores of groups at once")


@_check
async def check_a_group_of_one_has_a_score(probe: GroupRewardProbe) -> None:
    """An episode without others to compare with is scored."""
    for example in probe.examples:
        for number, answer in enumerate(example.answers):
            await probe.score(evolve(example, answers=(answer,), rewards=example.rewards[number : number + 1]))


@_check
async def check_equal_answers_have_scores(probe: GroupRewardProbe) -> None:
    """A group whose answers and rewards are all equal is scored, without a division by zero."""
    for example in probe.examples:
        count = len(example.answers)
        await probe.score(evolve(example, answers=example.answers[:1] * count, rewards=example.rewards[:1] * count))


@_check
async def check_empty_answers_have_scores(probe: GroupRewardProbe) -> None:
    """Episodes whose model wrote nothing are scored with the others."""
    for example in probe.examples:
        await probe.score(evolve(example, answers=("", *example.answers[1:])))
        await probe.score(evolve(example, answers=("",) * len(example.answers)))


@_check
async def check_a_failed_member_stays_failed(probe: GroupRewardProbe) -> None:
    """A member that failed before is delivered as it is, and the others are scored without it."""
    for example in probe.examples:
        if len(example.answers) > 2:
            scored = await probe.score(example, failed=1)
            expect_equal((scored[1].status, scored[1].scores), (Status.FAILED, ()), "the failed member")


def _rewards(episodes: Iterable[EpisodeResult]) -> list[float | None]:
    return [episode.reward for episode in episodes]


async def run_group_reward_checks(probe: GroupRewardProbe, names: Iterable[str] = GROUP_REWARD_CHECKS) -> None:
    """Run checks one after the other; the first that fails raises."""
    for name in names:
        await GROUP_REWARD_CHECKS[name](probe)
