"""Start, weight updates, death and stop of the embedded engine."""

import asyncio
import copy
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from turnwise.errors import ConfigError, EngineError, ReplicaDiedError
from turnwise.protocols import ModelSpec, Resources
from turnwise.types import FinishReason
from turnwise.weights.sources import as_numpy
from turnwise_testing.engines.scenarios import abort_when_heard, failure_of
from turnwise_transformers_engine import TransformersConfig, TransformersEngine
from turnwise_transformers_engine.layouts.rows import Progress
from turnwise_transformers_engine.loading import load_model, make_manager
from turnwise_transformers_engine.requests import Pending


def test_a_listener_hears_ids_before_the_end(tiny_model, serve, ask):
    """The first ids are heard while the others are sampled, and the result begins with them."""
    heard, result = serve(tiny_model, lambda engine: abort_when_heard(engine, ask(max_tokens=200)))

    assert FinishReason.ABORT == result.finish_reason
    assert heard
    assert heard == result.token_ids.tolist()[: len(heard)]


def test_an_update_drops_the_cache(tiny_model, other_model, other_weights, serve, ask, assert_logprobs):
    """After an update the same context is prefilled again under the new weights."""

    async def scenario(engine):
        before = await engine.generate(ask())
        await engine.update_weights(other_weights, 4)
        return before, await engine.generate(ask())

    before, after = serve(tiny_model, scenario)

    assert (before.weight_version, after.weight_version) == (0, 4)
    assert after.num_cached_tokens == 0
    assert_logprobs(before, tiny_model)
    assert_logprobs(after, other_model)


def test_an_update_during_a_request(tiny_model, other_model, other_weights, serve, ask, in_flight, assert_logprobs):
    """
    A request in flight has a version per token, and each token has the log-probability of its version.

    A second request with the same context, sent after the update while the first still runs, uses none of its cache.
    """

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            first = group.create_task(engine.generate(ask("first", max_tokens=200)))
            await in_flight(engine, "first", 40)
            await engine.update_weights(other_weights, 1)
            second = group.create_task(engine.generate(ask("second")))
        return first.result(), second.result()

    first, second = serve(tiny_model, scenario)

    num_old = int((first.weight_version == 0).sum())
    assert first.weight_version.tolist() == [0] * num_old + [1] * (200 - num_old)
    assert 40 <= num_old < 200
    assert_logprobs(first, tiny_model, part=slice(num_old))
    assert_logprobs(first, other_model, part=slice(num_old, None))
    assert second.weight_version == 1
    assert_logprobs(second, other_model)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("lm_haed.weight", np.zeros((512, 32), np.float32), "no weight 'lm_haed.weight'; did you mean 'lm_head.weig"),
        ("lm_head.weight", np.zeros((32, 512), np.float32), r"has shape \(512, 32\), got \(32, 512\)"),
        ("lm_head.weight", np.zeros((512, 32), np.int8), "must be of floating point, got int8"),
    ],
)
def test_bad_weights_change_nothing(tiny_model, other_weights, serve, ask, assert_logprobs, name, array, message):
    """One bad weight refuses the update; the engine continues with the old weights and their version."""

    async def scenario(engine):
        with pytest.raises(EngineError, match=message):
            await engine.update_weights([*other_weights, (name, array)], 1)
        return await engine.generate(ask())

    result = serve(tiny_model, scenario)

    assert result.weight_version == 0
    assert_logprobs(result, tiny_model)


def test_a_blocked_scheduler_without_requests_serves_again(tiny_model, serve_generic, ask):
    """The manager blocks new requests while the cache is full, and unblocks only when a request finishes."""

    async def scenario(engine):
        engine._backend.manager.batch_processor.scheduler.block_new_requests = True
        async with asyncio.timeout(10):
            return await engine.generate(ask())

    assert len(serve_generic(tiny_model, scenario).token_ids) == 16


def test_a_result_has_the_version_of_each_token(ask):
    """Tokens of an early read have no later versions, and a result without tokens has the given version."""
    progress = Progress()
    pending = Pending(request=ask(), handle="a#0", ended=None, output=progress, spans=progress.spans)
    for version in (1, 1, 2, 4):
        progress.start_version(version)
        progress.generated_tokens.append(5)
        progress.logprobs.append(-1.0)

    assert pending.result(aborted=False, version=9).weight_version.tolist() == [1, 1, 2, 4]
    del progress.logprobs[2:]
    assert pending.result(aborted=True, version=9).weight_version == 1
    progress.logprobs.clear()
    assert pending.result(aborted=True, version=9).weight_version == 9


def test_bfloat16_weights_are_read(tiny_model, other_model, serve, ask, assert_logprobs):
    """Arrays of `ml_dtypes.bfloat16` are loaded bit by bit."""
    rounded = copy.deepcopy(other_model)
    with torch.no_grad():
        for weight in rounded.parameters():
            weight.copy_(weight.bfloat16())
    weights = [(name, as_numpy(weight.bfloat16())) for name, weight in other_model.named_parameters()]

    async def scenario(engine):
        await engine.update_weights(weights, 1)
        return await engine.generate(ask())

    assert_logprobs(serve(tiny_model, scenario), rounded)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            RuntimeError("the device is gone"),
            {"generic": "the device is gone", "fused": "RuntimeError: the device is gone"},
        ),
        (SystemExit(3), {"generic": "it left no error", "fused": "SystemExit: 3"}),
    ],
)
@pytest.mark.filterwarnings("ignore:Exception in thread:pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_fails_all_requests(tiny_model, serve, ask, in_flight, decoder, error, cause):
    """A failing step ends the manager's thread, with or without an error text; running and later requests raise."""

    def broken(*_inputs, **_options):
        raise error

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            requests = [ask(str(i), max_tokens=200) for i in range(5)]
            tasks = [group.create_task(failure_of(engine.generate(each))) for each in requests]
            await in_flight(engine, "4")
            engine._backend.model.forward = broken
            if decoder == "fused":
                engine._backend.decoder.model = SimpleNamespace(decode=broken, model=engine._backend.model)
        later = [await failure_of(engine.generate(ask())), await failure_of(engine.update_weights([], 1))]
        return [task.result() for task in tasks] + later, engine.stats()["num_running"]

    failures, num_running = serve(tiny_model, scenario)

    assert [type(each) for each in failures] == [ReplicaDiedError] * 7
    assert {str(each) for each in failures} == {f"the transformers engine's thread died: {cause[decoder]}"}
    assert num_running == 0


def test_sleep_can_be_disabled(tiny_model, serve):
    """The error agrees with the capabilities."""

    async def scenario(engine):
        return engine.capabilities.sleep_levels, str(await failure_of(engine.sleep(1)))

    expected = frozenset(), "the transformers engine has no sleep level 1; it has none"
    assert expected == serve(tiny_model, scenario, sleep=False)


def test_starting_twice_is_refused(tiny_model, serve):
    """An engine starts once, and not again after a stop."""

    async def scenario(engine):
        again = await failure_of(engine.start())
        await engine.stop()
        return again, await failure_of(engine.start())

    assert [str(each) for each in serve(tiny_model, scenario)] == [
        "the transformers engine has been started already",
        "the transformers engine was stopped",
    ]


def test_stopping_while_starting_leaves_nothing_running(tiny_model):
    """The loaded model is freed, and `start` raises."""

    async def scenario():
        engine = TransformersEngine(TransformersConfig(model=tiny_model, device="cpu"), Resources())
        async with asyncio.TaskGroup() as group:
            start = group.create_task(failure_of(engine.start()))
            await asyncio.sleep(0)
            await engine.stop()
        return start.result(), await failure_of(engine.generate(None)), engine._backend

    start, later, backend = asyncio.run(scenario())

    assert str(start) == "the transformers engine was stopped while it was starting"
    assert str(later) == "the transformers engine was stopped"
    assert backend is None


@pytest.fixture
def serve_generic(serve, decoder):
    """As `serve`, for what only transformers' manager does."""
    if decoder != "generic":
        pytest.skip("about transformers' manager")
    return serve


def start_failure(path, kind=EngineError, **options):
    engine = TransformersEngine(TransformersConfig(device="cpu", **options), Resources(model=ModelSpec(path=path)))
    return str(asyncio.run(failure_of(engine.start(), kind)))


def test_a_wrong_model_directory_is_refused(tmp_path):
    """The directory may be missing, or contain another kind of model."""
    missing = start_failure(tmp_path / "no", ConfigError)
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    other = start_failure(tmp_path)

    assert missing == f"the model directory '{tmp_path / 'no'}' does not exist"
    assert other.startswith(f"cannot load a causal language model from '{tmp_path}': ValueError: ")


def test_missing_weights_are_reported(tmp_path, save_model):
    """transformers would initialise them randomly."""
    path = save_model(tmp_path) / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})

    assert start_failure(tmp_path, ConfigError) == (
        f"'{tmp_path}' lacks 1 weights of its model, such as 'model.layers.1.mlp.up_proj.weight'"
    )


def test_too_little_memory_is_reported(tiny_model, decoder):
    """The error is about the cache, not about the model."""
    assert start_failure(tiny_model, memory_fraction=1e-9, decoder=decoder).startswith(
        "cannot make the cache: MemoryError"
    )


def test_a_cache_smaller_than_one_context_is_refused(tiny_model):
    """The manager would crash on a long request instead of failing it."""
    config = TransformersConfig(device="cpu", num_blocks=2)

    with pytest.raises(ConfigError, match="the KV cache has 2 pages, too few for max_context, 100 tokens"):
        make_manager(config, load_model(config, ModelSpec(path=tiny_model)), max_context=100)


FRESH_PROCESS = """
import asyncio, sys
from pathlib import Path
from turnwise.errors import ConfigError
from turnwise.protocols import Resources
from turnwise_transformers_engine import TransformersConfig, TransformersEngine

config = TransformersConfig(model=Path(sys.argv[1]), device="cpu", max_context=64)
if "no torch" in sys.argv:
    sys.modules["torch"] = None
try:
    asyncio.run(TransformersEngine(config, Resources()).start())
    print("started")
except ConfigError as error:
    print(error)
"""


def fresh_process(*arguments):
    command = [sys.executable, "-c", FRESH_PROCESS, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout


def test_a_missing_torch_is_reported(tiny_model):
    """The error names the packages in one line."""
    returncode, output = fresh_process(tiny_model, "no torch")

    assert returncode == 0
    assert output.startswith("the transformers engine cannot import torch and transformers: ")
    assert output.count("\n") == 1


@pytest.mark.slow
def test_an_abandoned_engine_does_not_keep_the_process_alive(tiny_model):
    """The manager's thread ends with the main thread."""
    assert fresh_process(tiny_model) == (0, "started\n")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_context", 1),
        ("page_size", 2),
        ("num_blocks", 0),
        ("max_batch_tokens", 0),
        ("memory_fraction", 0.0),
        ("num_threads", 2**63 - 1),
    ],
)
def test_bad_options_are_refused(option, value):
    """The error names the option and the bound."""
    with pytest.raises(ValueError, match=f"'{option}' must be"):
        TransformersConfig(**{option: value})
