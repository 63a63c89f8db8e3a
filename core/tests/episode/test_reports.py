"""Texts for people: a result has those of tools, agents and rewards, in order and bounded."""

import asyncio

from episode_fakes import LookTool, LoopAgent, ScriptedAgent, run

from turnwise import Report, Status, ToolCall, ToolResult
from turnwise.report import MAX_CHARACTERS, MAX_REPORTS, shorten_middle


class ReportingReward:
    """Scores an episode, and says why."""

    async def score(self, episode):
        episode.note_report(Report(title="graded", failed=True))
        return 1.0


def test_reports_have_their_places():
    """Of a tool that is called before any turn, and of the reward after two turns."""

    async def look():
        return ToolResult(text="7", report=Report(title="looked", text="x" * (MAX_CHARACTERS + 5), num_turns=99))

    class Agent(LoopAgent):
        async def step(self, episode):
            if episode.state == "pending":
                await episode.call_tool(ToolCall(name="look", arguments={}))
            return await super().step(episode)

    result = run(Agent(), tools=[LookTool(look)], reward=ReportingReward())

    assert result.status is Status.COMPLETED, result.fault
    assert [("looked", 0, False), ("graded", 2, True)] == [
        (each.title, each.num_turns, each.failed) for each in result.reports
    ]
    assert "… 5 characters more …" in result.reports[0].text


def test_too_many_reports_are_counted():
    """A result keeps the first, and a metric counts the others."""

    async def script(episode):
        episode.begin([1])
        for number in range(MAX_REPORTS + 3):
            episode.note_report(Report(title=f"{number}"))
        await asyncio.sleep(0)

    result = run(ScriptedAgent(script))

    assert len(result.reports) == MAX_REPORTS
    assert result.metrics.extra["reports_left_out"] == 3


def test_a_tool_returns_something_else():
    """The model reads the mistake of the tool."""
    texts: list[str] = []

    async def look():
        return ToolResult(text="7", report="looked")

    async def script(episode):
        episode.begin([1])
        texts.append((await episode.call_tool(ToolCall(name="look", arguments={}))).text)

    run(ScriptedAgent(script), tools=[LookTool(look)])

    assert texts == ["Error: TypeError: the tool returned the report 'looked', expected a Report or None"]


def test_a_text_keeps_its_ends():
    """And says how much is left out between them; a short text stays."""
    assert shorten_middle("abc", 3) == "abc"
    assert shorten_middle("abcdefg", 4) == "ab\n… 3 characters more …\nfg"
