"""A training step on environments of verifiers and OpenEnv; a package that is missing skips its test."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

import turnwise_calculator_demo
from turnwise.cli import main

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def train_one_step(folder: Path, **agent: Any) -> Mapping[str, float]:
    """Take a step with the options of the Gymnasium example in another environment; return its metrics."""
    config = yaml.safe_load((ROOT / "examples/train_gymnasium.yaml").read_text(encoding="utf-8"))
    rows = [
        {"prompt": [{"role": "user", "content": f"Say something short, {number}."}], "idx": number}
        for number in range(2)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config["data"] = {"path": "tasks.jsonl"}
    config["agent"] = {"name": "environment", **agent}
    config["rollout"] |= {"n": 4, "max_in_flight": 4, "sampling": {"temperature": 1.5, "max_tokens": 24}}
    config["train"] |= {"num_steps": 1, "tasks_per_step": 2}
    config["train"]["algorithm"]["ppo_mini_batch_size"] = 8
    (folder / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

    assert main(["train", str(folder / "run.yaml"), "--out", str(folder / "out")]) == 0
    lines = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    (step,) = [line for line in lines if "reward/mean" in line]
    before = load_file(Path(str(turnwise_calculator_demo.__file__)).parent / "model" / "model.safetensors")
    after = load_file(folder / "out" / "model" / "model.safetensors")
    assert any((before[name] != after[name]).any() for name in before)
    return step


def test_a_step_in_an_environment_of_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewards of verifiers train the model: its weights change."""
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed here")
    monkeypatch.syspath_prepend(str(ROOT / "plugins/environments/tests/verifiers_site"))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    step = train_one_step(tmp_path, environment="verifiers", options={"taskset": "outside_lengths"})

    assert 0.0 < step["reward/mean"] <= 1.0


@pytest.fixture
def server() -> Iterator[str]:
    """The address of an OpenEnv server, whose environment pays for short messages."""
    pytest.importorskip("openenv", reason="openenv is not installed here")
    import uvicorn
    from openenv.core.env_server import Environment, create_fastapi_app
    from openenv.core.env_server.types import Action, Observation, State

    class Say(Action):
        message: str

    class Short(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Observation:
            return Observation(metadata={})

        def step(self, action: Say, timeout_s: float | None = None, **options: Any) -> Observation:
            return Observation(reward=1.0 / (1.0 + len(action.message)), done=True)

        @property
        def state(self) -> State:
            return State()

    listener = socket.create_server(("127.0.0.1", 0))
    app = create_fastapi_app(Short, Say, Observation, max_concurrent_envs=8)
    served = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=served.run, args=([listener],), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    served.should_exit = True
    thread.join()


def test_a_step_in_an_environment_of_openenv(tmp_path: Path, server: str) -> None:
    """The rewards of an OpenEnv server train the model: its weights change."""
    step = train_one_step(tmp_path, environment="openenv", options={"url": server, "action": "message"})

    assert 0.0 < step["reward/mean"] <= 1.0
