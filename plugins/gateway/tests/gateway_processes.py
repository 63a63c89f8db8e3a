"""Real processes of `turnwise gateway`, with a scripted engine, and clients of their ports."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from turnwise_testing.whole_runs.installation import install_plugin

PARTS = """
import asyncio
from pathlib import Path

import numpy as np
import turnwise
from attrs import evolve

GATE = Path(__file__).with_name("gate")


def make(_config, _resources):
    from turnwise_testing.engines.scripted import SCRIPTED_CAPABILITIES, ScriptedEngine

    class GatedEngine(ScriptedEngine):
        async def generate(self, request):
            # The turns of a prompt of this length wait for a file, so its client can leave before there is a turn.
            while 100 < len(request.token_ids) <= 150 and not GATE.exists():
                await asyncio.sleep(0.02)
            result = await super().generate(request)
            size = len(request.token_ids) + len(result.token_ids)
            return evolve(result, columns={"places": np.arange(2 * size).reshape(size, 2)})

    def sample(request):
        size = len(request.token_ids)
        return [20 + size % 7, 21 + size % 5, 22, request.sampling.stop_token_ids[0]]

    def wait(request):
        # A long prompt is never answered, so its client can leave before there is a turn.
        return 3600.0 if len(request.token_ids) > 150 else 0.0

    capabilities = evolve(SCRIPTED_CAPABILITIES, columns=frozenset(["places"]))
    return GatedEngine(sample, capabilities=capabilities, latency_s=wait)


@turnwise.hookimpl
def register_columns(registry):
    def make_places(_config, _resources):
        return turnwise.ColumnSpec(name="places", dtype="int16", shape=(2,), fill=-1, tokens="all")

    registry.add("places", make_places)


@turnwise.hookimpl
def register_engines(registry):
    registry.add("served_script", make)
"""
CONFIG = """
model: {path: "package:turnwise_calculator_demo"}
data: {path: tasks.jsonl}
engine: served_script
agent: {name: external, command: [python, unused.py], max_calls: 5}
rollout: {prompt_length: 256, response_length: 512, max_in_flight: 3}
telemetry: {log_level: warning}
"""
TASKS = [
    {"uid": f"t{number}", "messages": [{"role": "user", "content": f"What is {number} + 1?"}]} for number in (1, 2)
]


def write_run(folder: Path, **agent: object) -> Path:
    """Write a config with options of its agent, its data set and the plugin of its engine; return the config."""
    install_plugin(folder / "plugins", "turnwise_served_parts", PARTS)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    config = folder / "run.yaml"
    more = "".join(f", {name}: {json.dumps(value)}" for name, value in agent.items())
    config.write_text(CONFIG.replace("max_calls: 5", f"max_calls: 5{more}"))
    return config


def run_turnwise(folder: Path, *arguments: object, path: str = "plugins") -> subprocess.CompletedProcess[str]:
    """Run a command to its end; `path` is the folder of the run's own plugin."""
    environment = _environment(folder, path)
    return subprocess.run(_command(arguments), capture_output=True, text=True, check=False, env=environment)


@contextmanager
def serve(folder: Path, *arguments: object) -> Iterator[Served]:
    """Run `turnwise gateway serve` inside the `with` statement, from the moment that it listens."""
    process = subprocess.Popen(
        _command(("gateway", "serve", *arguments)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(folder),
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        while lines[-1] and not lines[-1].startswith("secret"):
            lines.append(process.stdout.readline())
        assert lines[-1], process.communicate()[1]
        yield Served(process, folder, lines)
    finally:
        process.kill()
        process.communicate()


def _command(arguments: tuple[object, ...]) -> list[str]:
    return [sys.executable, "-m", "turnwise.cli", *map(str, arguments)]


def _environment(folder: Path, path: str = "plugins") -> dict[str, str]:
    paths = [str(folder / path), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class Served:
    """A running gateway."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, lines: list[str]) -> None:
        self.process, self.lines = process, lines
        self.out = folder / "out"
        file = self.out / "control.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        self.access = json.loads(file.read_text())

    def stop(self, how: signal.Signals = signal.SIGINT) -> tuple[int, str, str]:
        """End the process; return its exit code, its output and its errors."""
        self.process.send_signal(how)
        output, errors = self.process.communicate(timeout=600)
        return self.process.returncode, output, errors

    def control(self, method: str, path: str, body: object = None, *, key: str = "", status: int = 200) -> Any:
        """Send a request to the control port, with its secret or another key."""
        return request(method, self.access["url"] + path, body, key or self.access["secret"], status)

    def open(self, **body: object) -> dict[str, Any]:
        """Open a session."""
        session: dict[str, Any] = self.control("POST", "/sessions", body)["session"]
        return session


def chat(session: dict[str, Any], messages: list[dict[str, Any]], status: int = 200) -> Any:
    """Call the model; return its message, or the error."""
    body = {"model": session["model"], "messages": messages}
    reply = request("POST", f"{session['openai_base_url']}/chat/completions", body, session["api_key"], status)
    return reply["choices"][0]["message"] if status == 200 else reply["error"]


def open_gate(folder: Path) -> None:
    """Let the engine of a run answer prompts of 101 to 150 tokens."""
    (gate,) = (folder / "plugins").rglob("turnwise_served_parts*.py")
    gate.with_name("gate").touch()


def converse(session: dict[str, Any], num_turns: int = 2, question: str = "Hello?") -> list[dict[str, Any]]:
    """Talk to the model; return the messages."""
    messages: list[dict[str, Any]] = []
    for _ in range(num_turns):
        messages.append({"role": "user", "content": question})
        messages.append(chat(session, messages))
    return messages


def leave(session: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """Call the model, and leave before it has answered."""
    body = json.dumps({"model": session["model"], "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {session['api_key']}"}
    sent = urllib.request.Request(f"{session['openai_base_url']}/chat/completions", body, headers)
    with pytest.raises(TimeoutError):
        urllib.request.urlopen(sent, timeout=2)


def request(method: str, url: str, body: object, key: str, status: int) -> Any:
    """Send a request, check its status and return its JSON."""
    found, reply = send(method, url, None if body is None else json.dumps(body).encode(), key)
    assert status == found, reply
    return reply


def send(method: str, url: str, body: bytes | None, key: str, headers: Mapping[str, str] = {}) -> tuple[int, Any]:
    """Send a request; return its status and its JSON."""
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
    sent = urllib.request.Request(url, body, head, method=method)
    try:
        with urllib.request.urlopen(sent, timeout=600) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
