"""Prompts are measured before the first episode, by every command that runs tasks, on both runtimes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from turnwise.cli import main
from turnwise_testing.whole_runs.installation import install_plugin

MARKING = """
import pathlib
import turnwise
from turnwise_testing.engines.scripted import RandomPolicy, ScriptedEngine


class Marking(ScriptedEngine):
    async def start(self):
        pathlib.Path(__file__).with_name("started").touch()
        await super().start()


@turnwise.hookimpl
def register_engines(registry):
    policy = RandomPolicy(seed=3, vocab_size=80, end_token_id=1, mean_tokens=4)
    registry.add("marking", lambda config, resources: Marking(policy=policy))


@turnwise.hookimpl
def register_rewards(registry):
    class One:
        def score(self, episode):
            return turnwise.TrajectoryScore(value=1.0)

    registry.add("one", lambda config, resources: One())


class Own:
    async def step(self, episode):
        episode.begin([3] * len(episode.task.messages[0]["content"]))
        await episode.generate()
        return "terminated"


@turnwise.hookimpl
def register_agents(registry):
    registry.add("own", lambda config, resources: Own())
"""
SHORT, LONG, LONGER = "What is 2 + 2?", "word " * 40, "word " * 50
ROWS = [SHORT, LONG, SHORT, LONGER]
COMMANDS = {
    "rollout": ("rollout", "data.path=mixed.jsonl"),
    "rollout of held-out tasks": ("rollout", "rollout.validation=true", "data.validation_path=mixed.jsonl"),
    "eval": ("eval", "data.validation_path=mixed.jsonl"),
    "eval to a folder": ("eval", "data.validation_path=mixed.jsonl"),
    "train": ("train", "data.path=mixed.jsonl"),
    "held-out tasks of train": ("train", "data.validation_path=mixed.jsonl"),
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config with the demo's model, a data set with two long rows, and one without."""
    install_plugin(tmp_path / "site", "acme_marking", MARKING)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "acme_marking", raising=False)
    config = {
        "model": {"path": "package:turnwise_calculator_demo"},
        "data": {"path": "short.jsonl", "validation_path": "short.jsonl"},
        "engine": "marking",
        "agent": "single_turn",
        "reward": "one",
        "rollout": {"n": 2, "prompt_length": 64, "response_length": 8},
        "train": {"num_steps": 1, "tasks_per_step": 2, "policy": {"device": "cpu"}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    write(tmp_path / "short.jsonl", [SHORT, SHORT])
    write(tmp_path / "mixed.jsonl", ROWS)
    return tmp_path


def write(path: Path, prompts: list[str], **columns: str) -> None:
    rows = [{"prompt": text, "uid": f"t{number}", **columns} for number, text in enumerate(prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def call(site: Path, command: str, *overrides: str, out: bool = True) -> int:
    return main([command, str(site / "run.yaml"), *overrides, *(["--out", str(site / "out")] if out else [])])


def started(site: Path) -> bool:
    return (site / "site" / "started").exists()


@pytest.mark.many_cases(2)
@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_long_prompt_is_refused_before_an_engine_starts(
    site: Path, capfd: pytest.CaptureFixture[str], name: str, runtime: str
) -> None:
    """One line names the data set, the row, its tokens, and what to set; nothing is written."""
    command, *overrides = COMMANDS[name]

    code = call(site, command, *overrides, f"runtime={runtime}", out=name != "eval")

    error = capfd.readouterr().err
    assert code == 2
    assert not started(site)
    (line,) = [each for each in error.splitlines() if "prompt_length" in each]
    key = "data.path" if "data.path=mixed.jsonl" in overrides else "data.validation_path"
    assert f"{key}: prompt of task 't1' (row 1) has " in line
    assert "; 2 of 4 rows are too long, the longest has " in line
    assert "data.prompt_policy to drop, truncate_left or truncate_right" in line
    assert not (site / "out" / "config.resolved.yaml").exists()
    longest = line.partition("set rollout.prompt_length=")[2].partition(",")[0]
    assert command == "train" or call(site, command, *overrides, f"rollout.prompt_length={longest}") == 0


@pytest.mark.parametrize(
    ("policy", "text"),
    [("drop", "are dropped"), ("truncate_left", "at their start"), ("truncate_right", "at their end")],
)
def test_policies_tell_how_many_rows(site: Path, capfd: pytest.CaptureFixture[str], policy: str, text: str) -> None:
    """One warning counts the rows before the run, which then goes on."""
    code = call(site, "rollout", "data.path=mixed.jsonl", f"data.prompt_policy={policy}", "telemetry.log_format=json")

    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    (warning,) = [line for line in lines if "longer than rollout.prompt_length" in line["event"]]
    assert code == 0
    assert text in warning["event"]
    assert (warning["rows"], warning["of"], warning["first_row"], warning["prompt_length"]) == (2, 4, 1, 64)


@pytest.mark.many_cases(2)
@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (("data.limit=1",), 0),
        (("data.limit=2",), 2),
        (("data.prompt_policy=drop",), 0),
        (("agent.name=single_turn", f"agent.system_prompt={'x' * 200}", "data.path=short.jsonl"), 2),
        (("agent=tool_agent", "data.path=short.jsonl"), 0),
        (("agent=own", "data.path=short.jsonl"), 0),
    ],
    ids=["before the row", "with the row", "dropped", "system prompt", "tool_agent", "an agent of its own"],
)
def test_the_prompt_is_that_of_the_agent(site: Path, overrides: tuple[str, ...], code: int) -> None:
    """Only the rows of the run count, with all that the agent adds to them."""
    assert call(site, "rollout", "data.path=mixed.jsonl", *overrides) == code
    assert started(site) == (code == 0)


def test_each_row_has_its_agent(site: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A row that names an agent is measured with it; one whose agent does not tell its prompt is not measured."""
    write(site / "named.jsonl", [SHORT, SHORT], agent_name="wordy")
    agents = f"agents={{wordy: {{name: single_turn, system_prompt: {'x' * 200}}}}}"
    assert call(site, "rollout", "data.path=named.jsonl", agents) == 2
    assert "2 of 2 rows are too long" in capfd.readouterr().err


def test_a_resumed_run_measures_nothing_again(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part has measured the rows."""
    assert call(site, "rollout") == 0
    from turnwise_single_turn.agent import SingleTurn

    monkeypatch.setattr(SingleTurn, "first_prompt", None)
    assert main(["rollout", "--resume", str(site / "out")]) == 0
