"""`turnwise engines doctor` says what there is, what works, and what to do."""

import json
import stat
import sys

import pytest

from turnwise.cli import main
from turnwise.cli.engine_survey import engines_here, transports_here
from turnwise.cli.engines_command import survey_of
from turnwise.host import Host
from turnwise.registry import NoConfig, Registry
from turnwise.testing.bigram import BigramEngine

CPU = {"kind": "cpu", "names": [], "reason": ""}
GPU = {"kind": "cuda", "names": ["a GPU"], "reason": ""}


def registry(kind, parts):
    made = Registry(kind)
    with made.owned_by("some_plugin"):
        for name, factory in parts.items():
            made.add(name, factory, config=NoConfig)
    return made


def rows_of(rows):
    return {row["name"]: row for row in rows}


def raising(error):
    def factory(_config, _resources):
        raise error

    return factory


def test_engines_that_are_missing_come_with_a_command():
    """By the device: the build for CPUs or the one for GPUs; what is there says what it can do."""
    host = Host(engines=registry("engine", {"bigram": lambda _config, _resources: BigramEngine()}))
    rows = rows_of(engines_here(host, CPU))

    assert ("ok", [1, 2], True) == tuple(rows["bigram"][key] for key in ("state", "sleep_levels", "weight_updates"))
    assert rows["vllm"]["state"] == "missing"
    assert rows["vllm"]["fix"].startswith(
        "pip install 'turnwise-vllm-engine[cpu]' (in a virtual environment of its own"
    )
    assert rows_of(engines_here(host, GPU))["sglang"]["fix"].startswith("pip install 'turnwise-sglang-engine[cuda]'")


def test_an_engine_that_cannot_be_built_without_options_is_there():
    """What it can do was not asked, and the row says why."""
    host = Host(engines=registry("engine", {"picky": raising(ValueError("which model?"))}))

    row = rows_of(engines_here(host, CPU))["picky"]
    assert "ok" == row["state"]
    assert row["reason"].startswith("not asked what it can do: ")
    assert "which model?" in row["reason"]


class Liar:
    """A transport that carries other numbers."""

    def publish(self, version, weights, num_readers):
        return self

    async def __aenter__(self):
        return None

    async def __aexit__(self, *_):
        return None

    async def apply(self, engine, offer):
        await engine.update_weights([], 1)

    async def close(self):
        return None


def test_transports_are_tried():
    """One that carries other numbers, one that lacks a package, one that needs a GPU: each with its state."""
    parts = {
        "liar": lambda _config, _resources: Liar(),
        "poor": raising(ModuleNotFoundError("no", name="fastwire")),
        "nccl": raising(AssertionError("not built without a GPU")),
    }
    rows = rows_of(transports_here(Host(weight_transports=registry("weight transport", parts)), CPU))

    assert ("broken", "ValueError: other numbers arrived than were sent: {}") == (
        rows["liar"]["state"],
        rows["liar"]["reason"],
    )
    assert ("missing", "pip install fastwire") == (rows["poor"]["state"], rows["poor"]["fix"])
    assert "unusable" == rows["nccl"]["state"]
    assert "pip install turnwise-weight-transports" == transports_here(Host(), CPU)[0]["fix"]


def test_a_missing_interpreter_is_named(tmp_path):
    """With the command that makes its environment."""
    found = survey_of(str(tmp_path / "venv/bin/python"))

    assert "there is no such interpreter" == found["error"]
    assert f"python3 -m venv {tmp_path / 'venv'}" == found["fix"]


@pytest.mark.parametrize(
    ("said", "error", "fix"),
    [
        ("No module named 'turnwise'", "turnwise is not installed there", "-m pip install turnwise"),
        ("ValueError: broken", "ValueError: broken", ""),
    ],
)
def test_an_interpreter_that_fails_is_explained(tmp_path, said, error, fix):
    """Without turnwise there is a command; otherwise its last line is shown."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "{said}" >&2\nexit 1\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)

    found = survey_of(str(python))

    assert (error, fix != "") == (found["error"], fix in found["fix"] and bool(fix))


@pytest.mark.slow
def test_the_command_prints_tables_and_json(capsys):
    """This interpreter, with everything that developers have: all transports that need no GPU work."""
    assert main(["engines", "doctor", "--json"]) == 0
    (survey,) = json.loads(capsys.readouterr().out)["interpreters"]
    assert main(["engines", "doctor", "--python", "/nowhere/bin/python"]) == 0
    text = capsys.readouterr().out

    states = {row["name"]: row["state"] for row in survey["transports"]}
    assert (sys.executable, "") == (survey["python"], survey["error"])
    assert {"ok"} == {states[name] for name in ("disk", "gloo", "ray", "shm")}
    assert [1, 2] == rows_of(survey["engines"])["transformers"]["sleep_levels"]
    assert "there is no such interpreter" in text
    assert "weight transport" in text
