"""An episode that ends before its machine has started: the machine is to blame, unless the run was asked to stop."""

import asyncio

import pytest
from episode_fakes import ConstantReward, LookTool, ScriptedAgent, run

from turnwise import Status, ToolCall
from turnwise.episode.setup import Limits
from turnwise.errors import InfrastructureError

NEVER = Limits(episode_s=60.0, tool_call_s=60.0)


class Machine(LookTool):
    """A tool whose session waits for a machine for ever."""

    def __init__(self, wants_machine=True):
        super().__init__(None)
        self.wants_machine, self.waiting = wants_machine, asyncio.Event()

    async def create(self, task):
        self.waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            if not self.wants_machine:
                raise
            raise InfrastructureError("no machine came in time") from error


async def call_one(episode):
    await episode.call_tool(ToolCall(name="look", arguments={}))


async def call_two(episode):
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(call_one(episode))


async def open_one(episode):
    await episode.open_tool("look")


def play(script, tool, *, limits=NEVER, use=None):
    """Run an episode with one step; the reward must not be asked."""

    async def step(episode):
        episode.begin([1])
        await script(episode)

    return run(ScriptedAgent(step), limits=limits, tools=[tool], use=use, reward=ConstantReward())


@pytest.mark.parametrize("script", [call_one, call_two, open_one])
def test_a_deadline_blames_the_machine(script):
    """The episode has no reward: it would be one for nothing that the model did."""
    result = play(script, Machine(), limits=Limits(episode_s=0.1, tool_call_s=60.0))

    assert (result.status, result.scores) == (Status.FAILED, ())
    assert (result.fault.owner, result.fault.message) == ("infra", "no machine came in time")


def test_a_deadline_in_other_tools_is_one():
    """As before."""
    result = play(call_one, Machine(wants_machine=False), limits=Limits(episode_s=0.1, tool_call_s=60.0))

    assert (result.status, result.fault.owner) == (Status.TIMED_OUT, "tool")


@pytest.mark.parametrize("script", [call_one, call_two, open_one])
def test_a_stop_of_the_run_is_no_failure(script):
    """The episode is aborted, and can be resumed."""
    tool = Machine()

    async def stop(episode):
        await tool.waiting.wait()
        episode.abort()

    result = play(script, tool, use=stop)

    assert result.status is Status.ABORTED
    assert result.unfinished is not None
