"""Rewards that grade what an episode left in the sessions of its tools."""

import asyncio

import pytest
from episode_fakes import ConstantReward, LoopAgent, TinyEngine, run

from turnwise import Status, ToolCall, ToolResult
from turnwise.episode.setup import Limits
from turnwise.errors import InfrastructureError, TrajectoryError
from turnwise.protocols import GradingReward, Wrapper


class NotesTool:
    """The tool `note`, whose session is the list of noted texts."""

    def __init__(self, name="note", *, fails=False):
        self.schema = {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        self.session_key = "notes"
        self.fails = fails
        self.events = []

    async def create(self, task):
        if self.fails:
            raise InfrastructureError("no machine is free")
        self.events.append("created")
        return []

    async def execute(self, session, arguments):
        session.append("noted")
        return ToolResult(text="")

    async def release(self, session):
        self.events.append(f"released with {session}")


class Grades:
    """Calls a function of the test with the episode, and may take some seconds."""

    def __init__(self, grade, seconds=60.0):
        self.grade, self.seconds = grade, seconds

    def grading_s(self, task):
        return self.seconds

    async def score(self, episode):
        return await self.grade(episode)


async def count(episode):
    """Return the number of notes, and note that they were graded."""
    session = await episode.open_tool("note")
    session.append("graded")
    return float(session.count("noted"))


async def note(episode):
    """Call the tool once."""
    await episode.call_tool(ToolCall(name="note"))


@pytest.mark.parametrize(("after", "reward"), [(note, 1.0), (None, 0.0)])
def test_sessions_are_open_until_the_reward_has_ended(after, reward):
    """The reward gets the session of the calls, or a new one; it is released once, after the reward."""
    tool = NotesTool()
    noted = ["noted"] if after else []

    result = run(LoopAgent(num_turns=1, after=after), tools=[tool], reward=Grades(count))

    assert (result.status, result.reward) == (Status.COMPLETED, reward)
    assert tool.events == ["created", f"released with {[*noted, 'graded']}"]


def test_tools_with_one_session_share_it_with_the_reward():
    """The name of any of them opens it."""
    first, second = NotesTool("first"), NotesTool()

    result = run(LoopAgent(num_turns=1, after=note), tools=[first, second], reward=Grades(count))

    assert result.reward == 1.0
    assert (first.events[:1], second.events) == (["created"], [])


def test_other_rewards_find_released_tools():
    """Nothing changes for a reward without the method."""
    tool = NotesTool()
    seen = []

    run(
        LoopAgent(num_turns=1, after=note),
        tools=[tool],
        reward=ConstantReward(lambda _: seen.extend(tool.events) or 1.0),
    )

    assert seen == ["created", "released with ['noted']"]


def test_grading_has_its_own_time():
    """It is neither cut by the time of rewards nor allowed more than its own."""

    async def slow(episode):
        await asyncio.sleep(0.05)
        return 1.0

    limits = Limits(reward_s=0.01)
    assert run(reward=Grades(slow), limits=limits).reward == 1.0
    late = run(reward=Grades(slow, 0.01), limits=limits)
    assert (late.status, late.fault.owner) == (Status.FAILED, "reward")
    assert "longer than 0.01 s" in str(late.fault)


def test_a_session_that_cannot_open_is_no_score():
    """The owner of the failure is the tool's."""
    result = run(tools=[NotesTool(fails=True)], reward=Grades(count))

    assert (result.status, result.fault.owner, result.scores) == (Status.FAILED, "infra", ())


@pytest.mark.parametrize("tools", [None, [NotesTool("other")]])
def test_an_unknown_tool_is_the_rewards_fault(tools):
    """The error names the tool."""
    result = run(tools=tools, reward=Grades(count))

    assert (result.status, result.fault.owner) == (Status.FAILED, "reward")
    assert "'note'" in str(result.fault)


def test_an_agent_that_goes_on_cannot_call_tools():
    """While the reward grades, a task that the agent left behind is refused."""
    refused = []

    async def go_on(episode, ended):
        await ended.wait()
        try:
            await episode.call_tool(ToolCall(name="note"))
        except TrajectoryError as error:
            refused.append(str(error))

    async def main():
        tool, ended, left = NotesTool(), asyncio.Event(), []

        async def after(episode):
            left.append(asyncio.get_running_loop().create_task(go_on(episode, ended)))

        async def grade(episode):
            ended.set()
            await left[0]
            return await count(episode)

        return tool, after, grade

    # The parts are made on a loop of their own: events of asyncio belong to the first loop that waits for them.
    tool, after, grade = asyncio.run(main())
    result = run(LoopAgent(num_turns=1, after=after), tools=[tool], reward=Grades(grade))

    assert (result.reward, refused) == (0.0, ["the episode has ended"])


def test_failed_episodes_are_not_graded():
    """Their tools are released at once."""
    tool = NotesTool()

    async def fail(episode):
        await note(episode)
        raise ValueError("oh no")

    result = run(LoopAgent(num_turns=1, after=fail), engine=TinyEngine(), tools=[tool], reward=Grades(count))

    assert (result.status, tool.events) == (Status.FAILED, ["created", "released with ['noted']"])


def test_a_wrapper_keeps_the_method():
    """A reward with a wrapper around it still grades."""
    assert isinstance(Wrapper(Grades(count)), GradingReward)
    assert not isinstance(Wrapper(ConstantReward()), GradingReward)
