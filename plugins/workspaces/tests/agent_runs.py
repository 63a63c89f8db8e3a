"""Runs of an agent with a scripted model that calls the tools of a workspace, through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_testing.whole_runs.installation import install_plugin

PLUGIN = '''
import json
from pathlib import Path

from transformers import AutoTokenizer
from turnwise import hookimpl
from turnwise_testing.engines.scripted import ScriptedEngine

TURNS = json.loads(Path(__file__).with_name("turns.json").read_text())


class Engine(ScriptedEngine):
    """Samples the turns in their order, by the number of the model's turns in the prompt."""

    def __init__(self, config, resources):
        tokenizer = AutoTokenizer.from_pretrained(resources.model.path)
        turns = [tokenizer.encode(turn + "<|im_end|>", add_special_tokens=False) for turn in TURNS]
        count = lambda ids: tokenizer.decode(ids).count("<|im_start|>assistant") - 1
        super().__init__(lambda request: turns[min(count(request.token_ids), len(turns) - 1)], record=False)


@hookimpl
def register_engines(registry):
    registry.add("scripted_turns", Engine)
'''


def call(name: str, **arguments: object) -> str:
    """Return a call of a tool as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def write_run(
    folder: Path,
    turns: Sequence[str],
    tool: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]] = ({},),
    deadlines: Mapping[str, float] | None = None,
    **sections: Any,
) -> Path:
    """
    Write a run whose model says the turns; return its config.

    Args:
        folder: of the run; it is on the path of modules.
        turns: of the model, the last without a call.
        tool: options of the tools `workspace`.
        rows: more columns of each task.
        deadlines: of the episodes.
        sections: of the config, in place of the usual ones.
    """
    install_plugin(folder, "scripted_turns", PLUGIN)
    (folder / "turns.json").write_text(json.dumps(list(turns)))
    byte_tokenizer().save_pretrained(folder / "model")
    tasks = [{"messages": [{"role": "user", "content": f"Question {n}"}], **row} for n, row in enumerate(rows)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    config = {
        "model": {"path": "model"},
        "data": {"path": "data.jsonl"},
        "engine": "scripted_turns",
        "agent": {"name": "tool_agent", "max_parallel_calls": 3, "max_tool_response_length": 2000},
        "parser": "hermes",
        "tools": [{"name": "workspace", "state": str(folder / "state"), **tool}],
        "rollout": {"n": 1, "prompt_length": 16384, "response_length": 16384, "deadlines": deadlines or {}},
        **sections,
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    return folder / "run.yaml"


def environment_of(folder: Path) -> dict[str, str]:
    """Return the environment of a process that finds the plugin of a run."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def roll_out(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the config of a folder."""
    return run_cli(folder, "rollout", "run.yaml", "--out", "out", *arguments)


def run_cli(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder."""
    command = [sys.executable, "-m", "turnwise.cli", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment_of(folder), capture_output=True, text=True, check=False, timeout=300
    )


def answers(episode: Any) -> list[str]:
    """Return what the tools answered in an episode."""
    return [message["content"] for message in episode.messages if message["role"] == "tool"]
