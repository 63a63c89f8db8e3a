"""Arguments and environment of SGLang's process, from the options and the model's directory."""

import json
import subprocess
import sys

import pytest

from turnwise.errors import ConfigError
from turnwise.protocols import ModelSpec, Resources
from turnwise.types import SamplingParams
from turnwise_sglang_engine import SglangConfig, SglangEngine, arguments
from turnwise_testing.engines.scenarios import VOCAB_SIZE


def arguments_for(model, **options):
    return arguments.server_arguments(SglangConfig(**options), ModelSpec(path=model))


def test_arguments_on_a_cpu(small_model):
    """Plain torch, float32, and a KV cache of limited size."""
    found = arguments_for(small_model, device="cpu", max_context=100)

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


def test_arguments_on_a_gpu(small_model):
    """Options become arguments, and unset options are left to SGLang."""
    found = arguments_for(
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


def test_engine_args_override_our_defaults(small_model):
    """A user's argument wins."""
    found = arguments_for(small_model, device="cpu", engine_args={"attention_backend": "intel_amx"})

    assert "intel_amx" == found["attention_backend"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine_args": {"tp_size": 2}}, "'engine_args' must not contain 'tp_size': set tensor_parallel_size"),
        ({"engine_args": {"skip_tokenizer_init": False}}, "must not contain 'skip_tokenizer_init': the engine sets it"),
        ({"engine_args": {"nnodes": 2}}, "must not contain 'nnodes': the engine sets it"),
        ({"max_context": 1}, "'max_context' must be >= 2"),
        ({"mem_fraction_static": 1.0}, "'mem_fraction_static' must be < 1"),
        ({"tensor_parallel_size": 0}, "'tensor_parallel_size' must be >= 1"),
    ],
)
def test_bad_options_are_refused(options, message):
    """The error names the option, and the one to set instead."""
    with pytest.raises(ValueError, match=message):
        SglangConfig(**options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 4096), ({"max_context": 100}, 100), ({"max_total_tokens": 208}, 200)],
)
def test_the_least_limit_bounds_the_context(small_model, options, expected):
    """The least of option, model and KV cache, known before the start."""
    engine = SglangEngine(SglangConfig(model=small_model, device="cpu", **options), Resources())

    assert (expected, VOCAB_SIZE) == (engine.capabilities.max_context, engine.capabilities.vocab_size)


def test_a_model_without_a_limit_gets_the_options(tmp_path):
    """A missing or broken config.json sets no limit; the start reports it."""
    assert 8192 == arguments.max_context(SglangConfig(), ModelSpec(path=tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 64}}))
    assert 64 == arguments.max_context(SglangConfig(), ModelSpec(path=tmp_path))


def test_auto_uses_a_visible_gpu(monkeypatch):
    """An explicit device wins."""
    found = []
    for gpu in (True, False):
        monkeypatch.setattr(arguments, "has_gpu", lambda gpu=gpu: gpu)
        found += [arguments.resolve_device(SglangConfig()), arguments.resolve_device(SglangConfig(device="cuda"))]

    assert ["cuda", "cuda", "cpu", "cuda"] == found


def test_ranks_on_a_cpu_share_the_cores(monkeypatch):
    """Every core belongs to one rank. With fewer cores than ranks, each rank gets all of them."""
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    found = []
    for cores in ({0, 1, 2, 3}, {5}):
        monkeypatch.setattr("os.sched_getaffinity", lambda _process, cores=cores: cores)
        environment = arguments.server_environment(SglangConfig(device="cpu", tensor_parallel_size=2, num_threads=1))
        found.append(environment["SGLANG_CPU_OMP_THREADS_BIND"])

    assert ["0,2|1,3", "5|5"] == found
    assert "1" == environment["OMP_NUM_THREADS"]


def test_a_node_of_several_has_its_own_devices(monkeypatch):
    """Ranks on a CPU share the cores of their node; on GPUs they see the GPUs of their bundles."""
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: {0, 1, 2, 3})
    on_cpu = arguments.server_environment(SglangConfig(device="cpu", tensor_parallel_size=4), num_nodes=2)
    on_gpu = arguments.server_environment(SglangConfig(device="cuda", tensor_parallel_size=4), 2, ["5", "6"])

    assert ("0,2|1,3", "") == (on_cpu["SGLANG_CPU_OMP_THREADS_BIND"], on_cpu["CUDA_VISIBLE_DEVICES"])
    assert "5,6" == on_gpu["CUDA_VISIBLE_DEVICES"]


STUBS = """
import sys
from turnwise_sglang_engine import stub_packages
stub_packages.install()
stub_packages.install()
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
    print("only the listed names exist")
found = [each for each in sys.meta_path if isinstance(each, stub_packages.StubFinder)]
print(plain(1), tuned(1), type(Inherits()).__name__, numpy.__name__, len(found))
"""


def test_stubs_can_be_imported_but_not_called():
    """Stub decorators return their function, classes can be subclassed, functions raise, and real packages win."""
    command = [sys.executable, "-c", STUBS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)

    assert done.stdout.splitlines() == [
        "sgl_kernel.assign_req_to_token_pool_cpu was called, but its package is not installed",
        "only the listed names exist",
        "2 3 Inherits numpy 1",
    ]


def test_penalties_need_a_scheduler_that_counts_each_token(small_model):
    """SGLang applies them a token late otherwise; the refusal says what to set."""
    resources = Resources(model=ModelSpec(path=small_model))
    sampling = SamplingParams(extra={"presence_penalty": 1.0})

    late, exact = (
        SglangEngine(SglangConfig(engine_args=options), resources).capabilities
        for options in ({}, {"disable_overlap_schedule": True})
    )

    exact.check_extra(sampling)
    for capabilities in (late, exact):
        capabilities.check_extra(SamplingParams(extra={"min_new_tokens": 3}))
        with pytest.raises(ConfigError, match=r"extra\.min_p: SGLang's log-probabilities do not include it"):
            capabilities.check_extra(SamplingParams(extra={"min_p": 0.1}))
    with pytest.raises(
        ConfigError, match=r"extra\.presence_penalty: .* set engine\.engine_args\.disable_overlap_sched"
    ):
        late.check_extra(sampling)
