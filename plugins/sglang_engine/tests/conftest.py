"""A pretended SGLang for the process, the model of the calculator demo, and the truth by a plain forward pass."""

import asyncio
import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from turnwise.protocols import Resources
from turnwise.types import GenerateRequest, SamplingParams
from turnwise_sglang_engine import SglangConfig, SglangEngine

VOCAB_SIZE = 512
HAS_SGLANG = importlib.util.find_spec("sglang") is not None
FAKE = Path(__file__).with_name("fake_sglang")


def pytest_collection_modifyitems(items):
    """Say why tests of the real SGLang do not run."""
    reason = "SGLang is not installed: run this in the environment that requirements-cpu.txt makes"
    for item in items:
        if item.get_closest_marker("sglang") and not HAS_SGLANG:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def pretended(monkeypatch):
    """Let the engine's process find the pretended SGLang, and the engine believe that it is installed."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    monkeypatch.setattr("turnwise_sglang_engine.arguments.check_installed", lambda: None)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """Directory of a model with two weights, enough for the pretended SGLang."""
    path = tmp_path_factory.mktemp("model")
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096, "eos_token_id": 9}
    (path / "config.json").write_text(json.dumps(config))
    save_file({"a.weight": np.zeros((2, 3), np.float32), "b.weight": np.zeros(4, np.float32)}, path / "m.safetensors")
    return path


@pytest.fixture
def make_pretended(pretended, small_model):
    """A function that makes an engine, not started, whose process runs the pretended SGLang, as on a GPU."""

    def make(**options):
        config = SglangConfig(**{"model": small_model, "device": "cuda", "max_context": 256, **options})
        return SglangEngine(config, Resources())

    return make


@pytest.fixture
def serve(make_pretended):
    """A function that runs `scenario(engine)` on a started engine of that kind, and stops it whatever happens."""

    def run(scenario, **options):
        async def main():
            engine = make_pretended(**options)
            await engine.start()
            try:
                async with asyncio.timeout(60):
                    return await scenario(engine)
            finally:
                await engine.stop()

        return asyncio.run(main())

    return run


@pytest.fixture(scope="session")
def ask():
    """A function that makes a greedy request of 16 tokens on 37 ids, unless told otherwise."""

    context = np.arange(3, 40) * 11 % VOCAB_SIZE

    def make(request_id="a", token_ids=context, **sampling):
        params = SamplingParams(**{"max_tokens": 16, "temperature": 0.0, **sampling})
        return GenerateRequest(request_id=request_id, trajectory_id="t", token_ids=token_ids, sampling=params)

    return make
