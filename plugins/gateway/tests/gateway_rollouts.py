"""Real processes of `turnwise rollout` whose engine always gives the same reply."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_testing.whole_runs.installation import install_plugin

ENGINE = """
import turnwise
from turnwise_testing.probes.agent import probe_chat
from turnwise_testing.engines.scripted import ScriptedEngine


def make(config, resources):
    reply = [*probe_chat().tokenizer.encode("It is done."), probe_chat().stop_token_ids[0]]
    return ScriptedEngine(lambda request: reply)


@turnwise.hookimpl
def register_engines(registry):
    registry.add("one_reply", make)
"""


def write_rollout(folder: Path, num_tasks: int, agent: dict[str, Any], *, max_in_flight: int) -> None:
    """Write `run.yaml`, its tasks `task-0` and so on, its model, and the plugin of its engine."""
    install_plugin(folder / "site", "acme_one_reply", ENGINE)
    byte_tokenizer().save_pretrained(folder / "model")
    tasks = [
        {"uid": f"task-{number}", "messages": [{"role": "user", "content": f"Question {number}"}]}
        for number in range(num_tasks)
    ]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    config = {
        "model": {"path": "model"},
        "data": {"path": "data.jsonl"},
        "engine": "one_reply",
        "agent": {"name": "external", **agent},
        "reward": "reported",
        "rollout": {"prompt_length": 256, "response_length": 256, "max_in_flight": max_in_flight},
        "plugins": ["acme_one_reply", "chat_templates", "gateway", "reported_reward", "task_pool"],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))


def start_rollout(folder: Path, *arguments: str, before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start `turnwise rollout`, by a command that comes before it; its output is in the file `log`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])}
    command = [*before, sys.executable, "-m", "turnwise.cli", "rollout", *arguments]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)


def wait_until(condition: Callable[[], object], text: Callable[[], str]) -> None:
    """Wait until a condition holds; fail with a text when it never does."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, text()
        time.sleep(0.05)
