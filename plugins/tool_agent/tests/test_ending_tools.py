"""Tools that end the episode."""

from __future__ import annotations

import asyncio

import pytest
from conversations import add, call, converse

from turnwise import Status, ToolResult
from turnwise.record.columns import Origin
from turnwise_testing.probes.agent import probe_chat


def hand_in() -> ToolResult:
    """End the episode."""
    return ToolResult(text="handed in", reward=0.5, ends_episode=True)


def test_the_other_calls_of_the_turn_run_to_their_ends():
    """Then the episode is complete, and its record ends with the turn of the model."""
    events: list[str] = []
    handed_in = asyncio.Event()

    async def slow(a: int) -> str:
        """
        End after the other tool.

        Args:
            a: Anything.
        """
        await handed_in.wait()
        events.append("slow")
        return "slow"

    async def end() -> ToolResult:
        """End the episode."""
        events.append("handed in")
        handed_in.set()
        return hand_in()

    turn = "Now." + call("slow", a=1) + call("end") + call("slow", a=2)
    done = converse(turn, "More.", tools=(slow, end), max_parallel_calls=3)

    assert ["handed in", "slow", "slow"] == events
    assert done.result.status is Status.COMPLETED
    assert done.episode.memory["ended_by"] == "tool"
    assert done.episode.memory["tool_rewards"] == [0.5]
    assert done.result.metrics.num_tool_calls == 3
    (trajectory,) = done.result.trajectories
    assert [Origin.ACTION] == [segment.origin for segment in trajectory.segments]
    assert ["user", "assistant"] == [message["role"] for message in done.result.messages]


def test_a_call_that_does_not_run_ends_nothing():
    """A call over the limit of one turn does not end the episode."""
    done = converse(call(a=1, b=1) + call("hand_in"), "Done.", tools=(add, hand_in), max_parallel_calls=1)

    assert done.episode.memory["ended_by"] == "answer"


@pytest.mark.parametrize("limit", range(3))
def test_results_need_no_room(limit):
    """The results are not appended, so the episode is complete as soon as there is a token left after the turn."""
    turn = call("hand_in")
    length = len(probe_chat().tokenizer.encode(turn)) + 1
    done = converse(turn, "More.", tools=(hand_in,), limits={"response_length": length + limit})

    expected = Status.TRUNCATED if limit == 0 else Status.COMPLETED
    assert done.result.status is expected
