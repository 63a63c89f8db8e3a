"""
Requirements of every reward, as plain functions without pytest.

A check takes a `RewardProbe` and raises `AssertionError` with a text that describes the failure. The episodes are
run by the real driver, whose scripted model writes the answers of the examples; the driver also checks the shape of
scores. Not covered: whether a reward is right, beyond the values that examples give.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from math import inf
from typing import Any

from attrs import evolve, field, frozen

from turnwise.errors import DataError
from turnwise.protocols import Chat, Reward, Tool
from turnwise.record.result import EpisodeResult
from turnwise.types import Status, Task
from turnwise_testing.checks.check import register
from turnwise_testing.checks.part import PartChecks, chat_resources
from turnwise_testing.probes.agent import AgentProbe, ReplayAgent, make_task, probe_chat, probe_resources
from turnwise_testing.probes.engine import expect, expect_equal


@frozen(kw_only=True)
class RewardExample:
    """
    An answer of the model to a task.

    Attributes:
        answer: text of the model's only turn.
        ground_truth: of the task.
        task: of the episode; the probe's default unless given.
        expected: the score, in sum; None when the example does not say.
    """

    answer: str
    ground_truth: Any = None
    task: Task = field(factory=make_task)
    expected: float | None = None


@frozen(kw_only=True)
class RewardProbe:
    """
    The probe of a reward.

    Attributes:
        make_reward: builds it, as the registered factory does.
        examples: at least one.
        chat: how answers become tokens.
        tools: of the episodes, for a reward that grades what they hold.
        tolerance: how far a score may be from the expected one.
    """

    make_reward: Callable[[], Reward]
    examples: tuple[RewardExample, ...]
    chat: Chat = field(factory=probe_chat)
    tools: Mapping[str, Tool] = field(factory=dict)
    tolerance: float = 1e-6

    async def score(
        self, example: RewardExample, reward: Reward | None = None, *, num_tokens: int | None = None
    ) -> EpisodeResult:
        """Return the scored episode of an example; `num_tokens` cuts the answer."""
        result = await self.run(example, reward, num_tokens=num_tokens)
        _expect_scored(result, example)
        return result

    async def run(
        self, example: RewardExample, reward: Reward | None = None, *, num_tokens: int | None = None
    ) -> EpisodeResult:
        """Return the episode of an example, which has a fault if the reward raised."""
        ids = [*self.chat.tokenizer.encode(example.answer), self.chat.stop_token_ids[0]][:num_tokens]
        agents = AgentProbe(
            make_agent=lambda: ReplayAgent(self.chat),
            turns=("",),
            resources=evolve(probe_resources(), tools=self.tools),
        )
        engine = evolve(agents.engine(), outputs=lambda _request: ids)
        await engine.start()
        task = evolve(example.task, ground_truth=example.ground_truth)
        # The time limit of the check is the only one: its error says which promise the reward does not keep.
        limits = agents.limits(response_length=len(ids) + 1, reward_s=inf)
        run = await agents.run(task, engine=engine, limits=limits, reward=reward or self.make_reward())
        return run.result


async def refusal_of_tasks(probe: RewardProbe) -> str | None:
    """Return the `DataError` of a reward that is for other tasks than those of the examples; None for every other."""
    for example in probe.examples:
        fault = (await probe.run(example)).fault
        if fault and fault.kind == DataError.__name__:
            return fault.message
    return None


RewardCheck = Callable[[RewardProbe], Coroutine[Any, Any, None]]

USUAL = (
    RewardExample(answer="The answer is 42.", ground_truth="42"),
    RewardExample(answer="\\boxed{41}", ground_truth="42"),
    RewardExample(answer="", ground_truth="42"),
)
"""Answers for a reward of which nothing is known."""
REWARD_CHECKS: dict[str, RewardCheck] = {}
"""Every check by the name of its function without `check_`."""
REWARDS = PartChecks(
    checks=REWARD_CHECKS,
    probe=lambda part: RewardProbe(
        make_reward=part.make, examples=part.examples, chat=part.chat, tools=part.resources.tools
    ),
    resources=chat_resources,
    examples="RewardExamples",
    usual=USUAL,
)


_check = register(REWARD_CHECKS)


@_check
async def check_fulfils_the_protocol(probe: RewardProbe) -> None:
    """The factory returns something with the method of a reward."""
    expect(isinstance(probe.make_reward(), Reward), "it is no Reward: it has no method `score`")


@_check
async def check_returns_a_score(probe: RewardProbe) -> None:
    """Every example has a finite `Score` that fits its trajectory."""
    expect(bool(probe.examples), "give the probe examples")
    for example in probe.examples:
        await probe.score(example)


@_check
async def check_expected_values(probe: RewardProbe) -> None:
    """Examples with an expected score get that score."""
    for example in probe.examples:
        result = await probe.score(example)
        if example.expected is not None:
            close = abs((result.reward or 0.0) - example.expected) <= probe.tolerance
            expect(close, f"answer {example.answer!r}: expected {example.expected}, got {result.reward}")


@_check
async def check_is_repeatable(probe: RewardProbe) -> None:
    """The same episode has the same score, in any order, from one object or from several."""
    reward = probe.make_reward()
    first = [(await probe.score(example, reward)).scores for example in probe.examples]
    again = [(await probe.score(example, reward)).scores for example in reversed(probe.examples)]
    expect_equal(again[::-1], first, "scores of the same episodes again")
    new = [(await probe.score(example)).scores for example in probe.examples]
    expect_equal(new, first, "scores of the same episodes by new objects")


@_check
async def check_many_at_once_do_not_mix(probe: RewardProbe) -> None:
    """One object scores many episodes at once, each as it does alone."""
    reward = probe.make_reward()
    alone = [(await probe.score(example, reward)).scores for example in probe.examples]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(probe.score(example, reward)) for example in [*probe.examples] * 4]
    expect_equal([task.result().scores for task in tasks], alone * 4, "scores of episodes at once")


@_check
async def check_empty_response_has_a_score(probe: RewardProbe) -> None:
    """A model that wrote nothing, or only ended its turn, is scored and fails nothing."""
    for example in probe.examples:
        await probe.score(example, num_tokens=0)
        await probe.score(evolve(example, answer=""))


@_check
async def check_cut_response_has_a_score(probe: RewardProbe) -> None:
    """An answer that the budget cut anywhere, in a character too, is scored."""
    for example in probe.examples:
        num_tokens = len(probe.chat.tokenizer.encode(example.answer))
        for stop in range(1, num_tokens, max(1, num_tokens // 20)):
            await probe.score(example, num_tokens=stop)


async def run_reward_checks(probe: RewardProbe, names: Iterable[str] = REWARD_CHECKS) -> None:
    """Run checks one after the other; the first that fails raises."""
    for name in names:
        await REWARD_CHECKS[name](probe)


def _expect_scored(result: EpisodeResult, example: RewardExample) -> None:
    fault = result.fault
    text = f"{fault.owner} {fault.kind}: {fault.message}\n{fault.traceback}" if fault else ""
    expect(result.status is not Status.FAILED, f"scoring the answer {example.answer!r} failed: {text}")
    expect(len(result.scores) == len(result.trajectories), f"{len(result.scores)} scores for the episode")
