"""What SGLang is started with, from the options and the model's directory."""

import json
import subprocess
import sys

import pytest

from turnwise.protocols import ModelSpec, Resources
from turnwise_sglang_engine import SglangConfig, SglangEngine, arguments


def started_with(model, **options):
    return arguments.server_arguments(SglangConfig(**options), ModelSpec(path=model))


def test_a_cpu_gets_what_runs_there(small_model):
    """Plain torch, float32, and a cache that does not take the machine's memory."""
    found = started_with(small_model, device="cpu", max_context=100)

    expected = {
        "attention_backend": "torch_native",
        "context_length": 108,
        "device": "cpu",
        "dtype": "float32",
        "max_running_requests": 64,
        "max_total_tokens": 808,
        "sampling_backend": "pytorch",
        "skip_tokenizer_init": True,
    }
    assert expected == {name: found[name] for name in expected}
    assert {"enable_memory_saver", "mem_fraction_static"}.isdisjoint(found)


def test_a_gpu_gets_the_options(small_model):
    """Sizes, sleep and memory; what is not set is left to SGLang."""
    found = started_with(
        small_model,
        device="cuda",
        tensor_parallel_size=4,
        pipeline_parallel_size=2,
        data_parallel_size=3,
        mem_fraction_static=0.7,
        stop_strings=True,
        engine_args={"schedule_policy": "lpm"},
    )

    expected = {
        "tp_size": 4,
        "pp_size": 2,
        "dp_size": 3,
        "dtype": "auto",
        "enable_memory_saver": True,
        "enable_weights_cpu_backup": True,
        "mem_fraction_static": 0.7,
        "schedule_policy": "lpm",
        "skip_tokenizer_init": False,
    }
    assert expected == {name: found[name] for name in expected}
    assert {"attention_backend", "max_running_requests", "max_total_tokens", "random_seed"}.isdisjoint(found)


def test_engine_args_may_set_what_a_cpu_gets(small_model):
    """They are the last word on what is no option."""
    found = started_with(small_model, device="cpu", engine_args={"attention_backend": "intel_amx"})

    assert "intel_amx" == found["attention_backend"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine_args": {"tp_size": 2}}, "'engine_args' must not hold 'tp_size': set tensor_parallel_size"),
        ({"engine_args": {"skip_tokenizer_init": False}}, "must not hold 'skip_tokenizer_init': the engine sets it"),
        ({"max_context": 1}, "'max_context' must be >= 2"),
        ({"mem_fraction_static": 1.0}, "'mem_fraction_static' must be < 1"),
        ({"tensor_parallel_size": 0}, "'tensor_parallel_size' must be >= 1"),
    ],
)
def test_bad_options_are_refused(options, message):
    """The error names the option, and what to set in its place."""
    with pytest.raises(ValueError, match=message):
        SglangConfig(**options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 4096), ({"max_context": 100}, 100), ({"max_total_tokens": 208}, 200)],
)
def test_the_context_is_as_long_as_the_least_of_all_limits(small_model, options, expected):
    """Option, model and cache; known before the start."""
    engine = SglangEngine(SglangConfig(model=small_model, device="cpu", **options), Resources())

    assert expected == engine.capabilities.max_context


def test_a_model_that_says_nothing_of_its_length_has_the_options(tmp_path):
    """Also when its file is broken, of which the start speaks."""
    assert 8192 == arguments.max_context(SglangConfig(), ModelSpec(path=tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 64}}))
    assert 64 == arguments.max_context(SglangConfig(), ModelSpec(path=tmp_path))


def test_hidden_gpus_are_no_gpus(monkeypatch):
    """A Ray actor without a GPU has an empty list of them."""
    monkeypatch.setattr(arguments, "_DRIVERS", ("/proc/self",))

    found = []
    for visible in ("0", "", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found.append(arguments.resolve_device(SglangConfig()))
    monkeypatch.setattr(arguments, "_DRIVERS", ("/no such driver",))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    assert ["cuda", "cpu", "cpu", "cpu"] == [*found, arguments.resolve_device(SglangConfig())]


def test_ranks_on_a_cpu_share_the_cores(monkeypatch):
    """Every core belongs to one rank; with fewer cores than ranks each rank has them all."""
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    found = []
    for cores in ({0, 1, 2, 3}, {5}):
        monkeypatch.setattr("os.sched_getaffinity", lambda _process, cores=cores: cores)
        environment = arguments.server_environment(SglangConfig(device="cpu", tensor_parallel_size=2, num_threads=1))
        found.append(environment["SGLANG_CPU_OMP_THREADS_BIND"])

    assert ["0,2|1,3", "5|5"] == found
    assert "1" == environment["OMP_NUM_THREADS"]


def test_remote_code_is_trusted_for_the_runs_model_alone(tmp_path):
    """A directory of the engine's own is not what the pinned revision speaks of."""
    trusted = ModelSpec(path=tmp_path / "run", trust_remote_code=True, revision="abc")

    own = arguments.model_spec(SglangConfig(model=tmp_path / "own"), Resources(model=trusted))
    run = arguments.model_spec(SglangConfig(), Resources(model=trusted))

    assert (own, run) == (ModelSpec(path=tmp_path / "own"), trusted)


STAND_INS = """
import sys
from turnwise_sglang_engine import stand_ins
stand_ins.install()
stand_ins.install()
import numpy, triton, triton.language as tl, torchvision.ops
from sgl_kernel import assign_req_to_token_pool_cpu
from sgl_kernel.mamba import causal_conv1d_fn_cpu

@triton.jit
def plain(x): return x + 1

@triton.autotune(configs=[triton.Config({})], key=["n"])
def tuned(x: tl.constexpr): return x + 2

class Inherits(triton.runtime.JITFunction): pass

try:
    assign_req_to_token_pool_cpu(1)
except NotImplementedError as error:
    print(error)
try:
    import sgl_kernel.scalar_type
except ImportError:
    print("no more than needed")
found = [each for each in sys.meta_path if isinstance(each, stand_ins.StandIns)]
print(plain(1), tuned(1), type(Inherits()).__name__, numpy.__name__, len(found))
"""


def test_stand_ins_can_be_imported_and_not_called():
    """Decorators leave functions alone, classes can be inherited from, functions raise, and real packages win."""
    command = [sys.executable, "-c", STAND_INS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout.splitlines() == [
        "sgl_kernel.assign_req_to_token_pool_cpu was called, and its package is not installed",
        "no more than needed",
        "2 3 Inherits numpy 1",
    ]
