"""Truncated episodes say which limit ended them, in files, tables and summaries, with every agent and runtime."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.cli import main
from turnwise.types import Status
from turnwise_result_files import read_results
from turnwise_testing.whole_runs.installation import install_plugin
from turnwise_testing.whole_runs.scripted_run import SITE, environment_of, write_scripted_run

WRITER = '''
"""An engine that writes one text again and again."""

from attrs import evolve, frozen

import turnwise
from turnwise_testing.engines.scripted import SCRIPTED_CAPABILITIES, ScriptedEngine

END = 258


@frozen
class Options:
    """
    The text of each turn, which another request may continue, and the limits of the engine.

    `own_limit` ends a turn early, as some servers do.
    """

    text: str = "hello"
    continues: bool = False
    max_context: int | None = None
    own_limit: int = 1000


def make_engine(options, _resources):
    ids = [*options.text.encode(), END]

    def outputs(request):
        written = max(n for n in range(len(ids)) if request.token_ids[len(request.token_ids) - n :].tolist() == ids[:n])
        return ids[written if options.continues else 0 :]

    capabilities = evolve(SCRIPTED_CAPABILITIES, max_context=options.max_context)
    engine = Limited(outputs, capabilities=capabilities, record=False)
    engine.own_limit = options.own_limit
    return engine


class Limited(ScriptedEngine):
    own_limit = 1000

    async def generate(self, request):
        limit = min(request.sampling.max_tokens, self.own_limit)
        return await super().generate(evolve(request, sampling=request.sampling.with_(max_tokens=limit)))


@turnwise.hookimpl
def register_engines(registry):
    registry.add("writer", make_engine, config=Options)
'''
OWN = '''
import aiohttp


def echo(text: str) -> str:
    """Repeat a text ten times."""
    return 10 * text


def python(code: str) -> str:
    """Pretend to run a program."""
    raise AssertionError("the program ran")


class Room:
    def reset(self, task, seed):
        from turnwise_environments.protocol import Observation

        return Observation(text="Go.")

    def step(self, action):
        from turnwise_environments.protocol import Observation

        return Observation(text=30 * "x")

    def close(self):
        pass


async def ask(task, client):
    headers = {"Authorization": f"Bearer {client.api_key}"}
    messages = [dict(message) for message in task.messages]
    async with aiohttp.ClientSession(headers=headers) as http:
        for _ in range(5):
            body = {"model": client.model, "messages": messages, "max_tokens": task.extra.get("cut", 100)}
            async with http.post(f"{client.openai_base_url}/chat/completions", json=body) as response:
                answer = await response.json()
                if response.status != 200:
                    raise RuntimeError(answer["error"]["message"])
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "More."}]


async def ask_once(task, client):
    task.extra["cut"] = 3
    headers = {"Authorization": f"Bearer {client.api_key}"}
    body = {"model": client.model, "messages": list(task.messages), "max_tokens": 3}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{client.openai_base_url}/chat/completions", json=body) as response,
    ):
        await response.json()


async def two_records(episode, resources):
    for _ in range(3):
        episode.begin(resources.chat.prompt(episode.messages))
        await episode.generate()
'''
CALL = '<tool_call>{"name": "echo", "arguments": {"text": "abcdef"}}</tool_call>'
PROGRAM = "```python\nprint(1)\n```\n```output"

WIDE = "rollout.prompt_length=300"
LENGTH = "rollout.response_length"
CASES = {
    "single_turn, response": ("single_turn", [f"{LENGTH}=3"], LENGTH, 3, "the last turn used all 3 tokens"),
    "single_turn, one token": ("single_turn", [f"{LENGTH}=1"], LENGTH, 1, "the last turn used the only token"),
    "single_turn, context": (
        *("single_turn", ["engine.max_context=64", f"engine.text={99 * 'x'}"], "engine context", 64),
        "the last turn used all [0-9]+ tokens",
    ),
    "single_turn, sampling": (
        *("single_turn", ["rollout.sampling.max_tokens=4"], "rollout.sampling.max_tokens", 4),
        "the last turn used all 4 tokens",
    ),
    "single_turn, its option": (
        *("single_turn", ["agent.max_tokens=4"], "max_tokens of the agent", 4),
        "the last turn used all 4 tokens",
    ),
    "single_turn, sampled": (
        *("single_turn", ["rollout.max_sampled_tokens=4"], "rollout.max_sampled_tokens", 4),
        "the last turn used all 4 tokens",
    ),
    "single_turn, the engine's own": (
        *("single_turn", ["engine.own_limit=2"], "engine", None),
        "the engine ended the last turn after 2 of the 200 tokens that were left",
    ),
    "tool_agent, observation": (
        *("tool_agent", [f"engine.text={CALL}", f"{LENGTH}=90"], LENGTH, 90),
        "the observation of [0-9]+ tokens did not fit into the [0-9]+ that were left",
    ),
    "tool_agent, turn": ("tool_agent", [f"engine.text={CALL}", f"{LENGTH}=20"], LENGTH, 20, "no token is left"),
    "tool_agent, no room for a response": (
        *("tool_agent", [f"engine.text={CALL}", f"{LENGTH}={len(CALL) + 1}"], LENGTH, len(CALL) + 1),
        "no token is left for a response to the model's turn",
    ),
    "environment, observation": (
        *("environment", [f"{LENGTH}=30"], LENGTH, 30),
        "the observation of [0-9]+ tokens did not fit into the [0-9]+ that were left",
    ),
    "environment, turn": ("environment", [f"{LENGTH}=4"], LENGTH, 4, "the budget ended within the model's turn"),
    "external, context": (
        *("external", [f"{LENGTH}=60", "agent.function=own:ask"], LENGTH, 60),
        "the conversation has [0-9]+ tokens.*",
    ),
    "external, the client's limit": (
        *("external", ["agent.function=own:ask_once"], "max_tokens of the agent", 3),
        "the last turn used all 3 tokens",
    ),
    "external, sampled": (
        *("external", ["agent.function=own:ask", "rollout.max_sampled_tokens=8"], "rollout.max_sampled_tokens", 8),
        "no token was left for a turn of the model",
    ),
    "torl_python, program": (
        "torl_python",
        [f"engine.text={json.dumps(PROGRAM)}", "engine.continues=true", f"{LENGTH}={len(PROGRAM) + 3}", WIDE],
        *(LENGTH, len(PROGRAM) + 3),
        "an output of the model's program needs [0-9]+ tokens at least, and 3 were left",
    ),
    "own loop, records": (
        *("./own.py:two_records", ["rollout.max_records=2"], "rollout.max_records", 2),
        "the episode has 2 records, and max_records allows no more",
    ),
}
"""The agent, overrides, and the limit: its name, its value and the reason, as a pattern."""
ENDED = {
    "tool_agent": ("tool_agent", [f"engine.text={CALL}", "agent.max_assistant_turns=1"], "max_assistant_turns", 1),
    "environment": ("environment", ["agent.max_turns=2", f"{LENGTH}=400"], "max_turns", 2),
}
"""The agent, overrides, and the option that ends episodes which are complete."""
AGENTS = {
    "environment": {"name": "environment", "environment": "own:Room"},
    "tool_agent": {"name": "tool_agent", "tools_in_prompt": True},
    "external": {"name": "external"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two tasks with an engine that writes `hello`, and the module `own`."""
    install_plugin(tmp_path / SITE, "turn_writer", WRITER)
    (tmp_path / SITE / "own.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    write_scripted_run(
        tmp_path,
        num_tasks=2,
        engine={"name": "writer"},
        rollout={"n": 1, "prompt_length": 64, "response_length": 200},
        modules=["./own.py"],
        plugins=None,
    )
    monkeypatch.syspath_prepend(tmp_path / SITE)
    for name in ("own", "turn_writer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def command(folder: Path, agent: str, overrides: list[str]) -> list[str]:
    """Return the arguments of a rollout with an agent."""
    sections = [f"agent={json.dumps(AGENTS.get(agent, agent))}", "reward=null"]
    if agent == "tool_agent":
        sections += ["parser=hermes", "tools=[./own.py:echo]"]
    if agent == "torl_python":
        sections += ["tools=[./own.py:python]"]
    return ["rollout", str(folder / "run.yaml"), *sections, *overrides, "--out", str(folder / "out")]


@pytest.mark.many_cases(2)
@pytest.mark.parametrize("case", CASES)
def test_truncated_episodes_name_the_limit(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file, the table, `show` and the summary have the limit and the reason, and a line names the key to raise."""
    agent, overrides, name, value, reason = CASES[case]
    assert 0 == main(command(folder, agent, overrides)), capsys.readouterr().err
    printed = capsys.readouterr().out
    for result in read_results(folder / "out/trajectories.parquet"):
        assert result.limit is not None, (result.status, result.fault)
        assert (Status.TRUNCATED, name, value) == (result.status, result.limit.name, result.limit.value)
        assert re.match(reason, result.limit.reason), result.limit.reason
    assert {name: 2} == json.loads((folder / "out/metrics.json").read_text(encoding="utf-8"))["limits"]
    number = "" if value is None else f" of {value}"
    line = f"2 of 2 episodes were truncated: 2 by {name}{number}; raise it if they should end by themselves"
    assert line in printed
    assert name.split()[0] in printed.partition("ended by")[2]
    assert 0 == main(["show", str(folder / "out"), "0", "--no-color"])
    shown = capsys.readouterr().out.replace("\n", " ")
    assert re.search(f"ended: {reason}", shown)
    assert name in shown.partition("ended: ")[2]


@pytest.mark.parametrize("case", ENDED)
def test_complete_episodes_name_the_limit_of_the_agent(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An agent that counts its turns completes the episode, and the result names the option."""
    agent, overrides, name, value = ENDED[case]
    assert 0 == main(command(folder, agent, overrides)), capsys.readouterr().err
    printed = capsys.readouterr().out
    for result in read_results(folder / "out/trajectories.parquet"):
        assert result.limit is not None, (result.status, result.fault)
        assert (Status.COMPLETED, f"{name} of the agent") == (result.status, result.limit.name)
        assert (value, f"the agent ended the episode at its {name}") == (result.limit.value, result.limit.reason)
    assert "were truncated" not in printed


def test_episodes_that_end_by_themselves_have_no_limit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is no column, no line and no value."""
    assert 0 == main(command(folder, "single_turn", []))
    printed = capsys.readouterr().out
    assert "ended by" not in printed
    assert "truncated:" not in printed
    assert "limits" not in printed
    assert all(result.limit is None for result in read_results(folder / "out/trajectories.parquet"))


@pytest.mark.slow
@pytest.mark.ray
def test_the_limit_crosses_processes(folder: Path) -> None:
    """On Ray the results have the limits too."""
    agent, overrides, name, value, reason = CASES["tool_agent, observation"]
    arguments = [*command(folder, agent, overrides), "runtime=ray", "runtime.num_workers=1"]
    process = subprocess.run(
        [sys.executable, "-m", "turnwise.cli", *arguments],
        env=environment_of(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == process.returncode, process.stderr
    for result in read_results(folder / "out/trajectories.parquet"):
        assert result.limit is not None
        assert (name, value) == (result.limit.name, result.limit.value)
        assert re.match(reason, result.limit.reason)
