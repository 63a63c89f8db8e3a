"""A fake SGLang for the engine's process, and engines around it."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from turnwise.protocols import Resources
from turnwise_sglang_engine import SglangConfig, SglangEngine
from turnwise_testing.engines.scenarios import VOCAB_SIZE, run_scenario, simple_request, skip_without_package

FAKE = Path(__file__).with_name("fake_sglang")


def pytest_collection_modifyitems(items):
    """Skip tests of the real SGLang where it is not installed."""
    reason = "SGLang is not installed: run this in the environment of requirements-cpu.txt"
    skip_without_package(items, "sglang", "sglang", reason)


@pytest.fixture
def fake_sglang(monkeypatch):
    """Makes the engine's process find the fake SGLang, and the engine regard it as installed."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    monkeypatch.setattr("turnwise_sglang_engine.arguments.check_installed", lambda: None)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """The directory of a model with two weights, enough for the fake SGLang."""
    path = tmp_path_factory.mktemp("model")
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096, "eos_token_id": 9}
    (path / "config.json").write_text(json.dumps(config))
    save_file({"a.weight": np.zeros((2, 3), np.float32), "b.weight": np.zeros(4, np.float32)}, path / "m.safetensors")
    return path


@pytest.fixture
def make_fake_engine(fake_sglang, small_model):
    """A function that makes an engine whose process runs the fake SGLang, not started, as on a GPU."""

    def make(**options):
        config = SglangConfig(**{"model": small_model, "device": "cuda", "max_context": 256, **options})
        return SglangEngine(config, Resources())

    return make


@pytest.fixture
def serve(make_fake_engine):
    """A function that runs `scenario(engine)` on a started engine around the fake SGLang."""

    def run(scenario, **options):
        return run_scenario(make_fake_engine(**options), scenario)

    return run


@pytest.fixture(scope="session")
def ask():
    """A function that returns a greedy request of 16 tokens on 37 ids, unless told otherwise."""

    def make(*arguments, **sampling):
        return simple_request(*arguments, **{"temperature": 0.0, **sampling})

    return make


def make_vision_reference(kind, directory):
    """Write a tiny vision-language model. SGLang reads patches of Qwen2.5-VL only in the size of the large ones."""
    from turnwise_testing.references.vision_reference import VisionReference
    from turnwise_tiny_models import VisionSizes, image_processor, save_random_vision

    sizes, processor = VisionSizes(patch_size=14), image_processor(14, 112 * 112)
    return VisionReference(save_random_vision(kind, directory, sizes, processor=processor))


@pytest.fixture(scope="session")
def qwen2_5_vl(tmp_path_factory):
    """The forward pass of a tiny Qwen2.5-VL."""
    return make_vision_reference("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture(scope="session")
def qwen3_vl(tmp_path_factory):
    """The forward pass of a tiny Qwen3-VL."""
    return make_vision_reference("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))
