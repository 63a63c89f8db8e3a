"""Tasks that bring their own tools: the prompt shows them, and a call that nobody can run ends the episode."""

import asyncio
import json
from contextlib import suppress

import pytest
from attrs import define, evolve, field
from hypothesis import given
from hypothesis import strategies as st

from turnwise import Status, ToolCall
from turnwise.cli import main
from turnwise.errors import ConfigError, DataError
from turnwise.task_tools import read_later_tools, read_task_tools
from turnwise_plain_functions import tool
from turnwise_result_files import read_results
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_resources
from turnwise_tool_agent import make_tool_agent
from turnwise_tool_agent.config import ToolAgentConfig

SUGAR = {"type": "object", "properties": {"sugar": {"type": "integer"}}, "required": ["sugar"]}
BREW = {"type": "function", "function": {"name": "brew", "description": "Brew tea.", "parameters": SUGAR}}
DOUBLE = {"type": "function", "function": {"name": "double", "description": "Double it.", "parameters": {}}}
HALVE = {"type": "function", "function": {"name": "halve", "description": "Halve it.", "parameters": {}}}


def double(n: int) -> int:
    """
    Double a number.

    Args:
        n: The number.
    """
    return 2 * n


def halve(n: int) -> int:
    """
    Halve a number.

    Args:
        n: The number.
    """
    return n // 2


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def converse(*texts, column, later=None, run_tools=(), parser=None, **options):
    """Run one episode of a task with these columns of tools, whose model writes one text per turn."""
    resources = evolve(probe_resources(), tools={func.__name__: tool(func) for func in run_tools})
    resources = resources if parser is None else evolve(resources, parser=parser)
    agent = make_tool_agent(ToolAgentConfig(**options), resources)
    probe = AgentProbe(make_agent=lambda: agent, resources=resources, turns=texts)
    turns = iter(probe.turn_ids)

    async def run():
        engine = ScriptedEngine(lambda _request: next(turns))
        await engine.start()
        task = make_task(extra={"tools": column, "later_tools": later})
        return await probe.run(task, engine=engine, limits=probe.limits(prompt_length=4096))

    done = asyncio.run(run())
    (record,) = done.result.trajectories
    return done, resources.chat.tokenizer.decode(record.input_ids[: record.num_prompt_tokens])


@pytest.mark.parametrize("column", [[BREW], json.dumps([BREW])], ids=["list", "json"])
def test_the_prompt_shows_the_tools_of_the_task(column):
    """In place of the run's; the call stays in the messages, and nothing answers it."""
    done, prompt = converse(call("brew", sugar=1), column=column, run_tools=[double])
    assert "Brew tea." in prompt
    assert "Double a number." not in prompt
    assert done.result.status is Status.COMPLETED
    assert done.episode.memory["ended_by"] == "calls"
    (_, turn) = done.result.messages
    assert [each["function"]["name"] for each in turn["tool_calls"]] == ["brew"]


@pytest.mark.parametrize("text", [call("steep"), "<tool_call>{</tool_call>", call("brew", sugar="much")])
def test_any_call_ends_the_episode_if_no_tool_of_the_task_can_run(text):
    """Also an unknown, a malformed and a wrong one: one turn is what a data set about calls judges."""
    done, _ = converse(text, column=[BREW])
    assert done.episode.memory["ended_by"] == "calls"
    assert done.result.metrics.num_tool_calls == 0


def test_a_turn_without_calls_is_an_answer():
    """As for tasks without tools of their own."""
    done, _ = converse("No tool helps.", column=[BREW])
    assert done.episode.memory["ended_by"] == "answer"


def test_a_tool_of_the_run_executes_the_call_of_its_name():
    """The run's other tools are hidden from the task, so they refuse; the schema shown is the task's."""
    texts = [call("double", n=4), call("halve", n=4), "8"]
    done, prompt = converse(*texts, column=[DOUBLE], run_tools=[double, halve])
    assert "Double it." in prompt
    assert "Halve" not in prompt
    results = [each["content"] for each in done.result.messages if each["role"] == "tool"]
    assert results == ["8", "Error: there is no tool 'halve'; the tools are: double"]
    assert done.episode.memory["ended_by"] == "answer"


def test_a_call_of_a_tool_that_only_the_task_has_ends_a_mixed_conversation():
    """The calls before it have run."""
    texts = [call("double", n=4), call("brew", sugar=8)]
    done, _ = converse(*texts, column=[DOUBLE, BREW], run_tools=[double])
    assert done.episode.memory["ended_by"] == "calls"
    assert done.result.metrics.num_tool_calls == 1


@pytest.mark.parametrize("later", [[DOUBLE], json.dumps([DOUBLE])], ids=["list", "json"])
def test_a_later_tool_is_not_shown_and_runs(later):
    """In any turn: a message of the user may describe it. The run's other tools refuse as before."""
    texts = [call("double", n=4), call("halve", n=8), call("double", n=5), "10"]
    done, prompt = converse(*texts, column=[HALVE], later=later, run_tools=[double, halve])
    assert "Halve it." in prompt
    assert "Double" not in prompt
    assert [each["content"] for each in done.result.messages if each["role"] == "tool"] == ["8", "4", "10"]
    texts = [call("double", n=4), call("halve", n=8), "4"]
    done, _ = converse(*texts, column=[DOUBLE], later=[], run_tools=[double, halve])
    results = [each["content"] for each in done.result.messages if each["role"] == "tool"]
    assert results == ["8", "Error: there is no tool 'halve'; the tools are: double"]


def test_a_call_of_a_later_tool_that_nobody_runs_ends_the_episode():
    """As of a tool that the prompt shows."""
    done, _ = converse(call("brew", sugar=1), column=[DOUBLE], later=[BREW], run_tools=[double])
    assert done.episode.memory["ended_by"] == "calls"


def test_an_empty_column_shows_no_tools():
    """Not those of the run."""
    _, prompt = converse("Hello.", column=[], run_tools=[double])
    assert "Double a number." not in prompt


@define
class TypedParser:
    """A parser that records the tools by which it reads a turn."""

    seen: list = field(factory=list)

    def parse(self, token_ids):
        raise AssertionError("the tools of the task are left out")

    def parse_for(self, token_ids, tools):
        self.seen.append([each["function"]["name"] for each in tools])
        return "", (ToolCall(name="brew", arguments={"sugar": 1}),)


def test_the_parser_reads_a_turn_by_the_tools_of_the_task():
    """Formats without types in their values need them."""
    parser = TypedParser()
    converse("anything", column=[BREW], run_tools=[double], parser=parser)
    converse("anything", column=[BREW], later=[DOUBLE], parser=parser)
    assert parser.seen == [["brew"], ["brew", "double"]]


def test_tools_without_a_parser_end_the_run():
    """Before the first episode, because the prompts are measured then."""
    agent = make_tool_agent(ToolAgentConfig(), evolve(probe_resources(), parser=None, tools={}))
    with pytest.raises(ConfigError, match="cannot find calls of the tools that task 'probe-0'"):
        agent.first_prompt(make_task(extra={"tools": [BREW]}))
    assert len(agent.first_prompt(make_task())) > 0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("[]"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["function", "name"]), inner),
    max_leaves=8,
)


@given(st.one_of(json_values, st.lists(st.just(BREW) | json_values, max_size=3)))
def test_a_column_is_tools_or_an_error(column):
    """Any JSON value gives schemas with names, nothing, or one line that names the task."""
    task = make_task(extra={"tools": column, "later_tools": column})
    with suppress(DataError):
        found = read_task_tools(task)
        assert (found is None) == (column is None)
        assert all(schema["function"]["name"] for schema in found or ())
        assert read_later_tools(task) == (found or ())
        return
    for name, read in (("tools", read_task_tools), ("later_tools", read_later_tools)):
        with pytest.raises(DataError, match=rf"^task 'probe-0' \(row 0\): column '{name}'.*$"):
            read(task)


@pytest.fixture
def rows(tmp_path):
    """Write rows with a column `tools`."""

    def write(*columns, name="tools"):
        lines = [
            json.dumps({"prompt": f"Brew number {n}.", "ground_truth": "1", name: each})
            for n, each in enumerate(columns)
        ]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        return ["examples/calculator.yaml", f"data.path={tmp_path}/rows.jsonl", "rollout.n=1"]

    return write


@pytest.mark.slow
def test_rows_with_tools_from_the_command_line(tmp_path, rows, capsys):
    """Another agent reads no such column, whatever is in it; this one refuses a wrong one in one line."""
    more = ["reward=exact_match", "tools=[]", "rollout.prompt_length=1024", "--out"]
    assert main(["rollout", *rows([BREW], []), *more, str(tmp_path / "own")]) == 0, capsys.readouterr().err
    assert {result.status for result in read_results(tmp_path / "own")} <= {Status.COMPLETED, Status.TRUNCATED}

    wrong = rows([BREW], ["brew"])
    assert main(["rollout", *wrong, "agent=single_turn", *more, str(tmp_path / "other")]) == 0, capsys.readouterr().err
    assert {result.status for result in read_results(tmp_path / "other")} <= {Status.COMPLETED, Status.TRUNCATED}
    capsys.readouterr()
    assert main(["rollout", *wrong, *more, str(tmp_path / "refused")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert sum("column 'tools': schema 0 must have the form" in line for line in lines) == 1
    assert main(["rollout", *rows(["brew"], name="later_tools"), *more, str(tmp_path / "refused")]) == 2
    assert "column 'later_tools': schema 0 must have the form" in capsys.readouterr().err
