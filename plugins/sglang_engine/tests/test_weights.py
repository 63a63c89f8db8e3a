"""Weight updates of the engine, whole or not at all, and sleep."""

import asyncio

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from turnwise.errors import EngineError, ReplicaDiedError, TornWeightsError
from turnwise.types import FinishReason
from turnwise_engine_support.model_directory import checkpoint_shapes
from turnwise_engine_support.weight_checks import ExpectedWeights, expected_weights
from turnwise_sglang_engine.pictures import weight_names
from turnwise_sglang_engine.staging import stage
from turnwise_testing.engines.scenarios import failure_of

pytestmark = pytest.mark.usefixtures("starts_a_process")

GOOD = {"a.weight": np.full((2, 3), 2.0, np.float32), "b.weight": np.ones(4, np.float32)}
TORN, DEADLY = np.full(4, -13.0, np.float32), np.full(4, -14.0, np.float32)
"""Weights that the fake SGLang refuses, and that kill it."""
NO_WEIGHTS = "the engine has no valid weights, so all must be sent"


@pytest.mark.many_cases(1)
@pytest.mark.parametrize(
    "array",
    [
        np.full((2, 3), 2.5, np.float32),
        np.full((3, 2), 2.5, np.float64).T,
        np.full((2, 3), 2.5, ml_dtypes.bfloat16),
        torch.full((2, 3), 2.5, dtype=torch.bfloat16),
        torch.full((3, 2), 2.5, dtype=torch.float16, requires_grad=True).T,
    ],
    ids=["float32", "a view", "ml_dtypes", "torch", "a torch view"],
)
def test_every_kind_of_array_arrives(serve, ask, array):
    """The fake model adds up its last weight; the values are exact in each dtype."""

    async def scenario(engine):
        before = await engine.generate(ask(max_tokens=1))
        await engine.update_weights([("a.weight", array)], 4)
        return before, await engine.generate(ask(max_tokens=1))

    before, after = serve(scenario)

    assert (0, 4) == (before.weight_version, after.weight_version)
    assert 15 == (after.token_ids[0] - before.token_ids[0]) % 512
    assert 0 == after.num_cached_tokens


@pytest.mark.slow
def test_any_bucket_size_works(serve, ask):
    """Several buckets make one version."""

    async def scenario(engine):
        await engine.update_weights(iter(GOOD.items()), 5)
        return await engine.generate(ask(max_tokens=1))

    results = [serve(scenario, weight_bucket_bytes=size) for size in (1, 1 << 20)]

    assert [5, 5] == [each.weight_version for each in results]
    assert results[0].token_ids.tolist() == results[1].token_ids.tolist()


@pytest.mark.slow
def test_requests_in_flight_continue_after_an_update(serve, ask):
    """Each token has the version that sampled it."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.generate(ask(max_tokens=100)))
            await asyncio.sleep(0.1)
            await engine.update_weights(GOOD.items(), 3)
        return task.result()

    versions = serve(scenario).weight_version.tolist()

    assert 0 < versions.count(0) < 100
    assert [0] * versions.count(0) + [3] * versions.count(3) == versions


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("a.wieght", GOOD["a.weight"], "the model has no weight 'a.wieght'; did you mean 'a.weight'?"),
        ("b.weight", np.zeros(5, np.float32), r"weight 'b.weight' has shape \(4,\), got \(5,\)"),
        ("b.weight", np.zeros(4, np.int8), "weight 'b.weight' must be of floating point, got int8"),
        ("a.weight", GOOD["a.weight"], "weight 'a.weight' came twice"),
    ],
)
def test_bad_weights_change_nothing(serve, ask, name, array, message):
    """One bad weight refuses the update."""

    async def scenario(engine):
        with pytest.raises(EngineError, match=message):
            await engine.update_weights([("a.weight", GOOD["a.weight"]), (name, array)], 1)
        return await engine.generate(ask())

    assert serve(scenario).weight_version == 0


def test_a_failing_source_changes_nothing(serve, ask):
    """The error text contains the cause."""

    def broken():
        yield "a.weight", GOOD["a.weight"]
        raise OSError("the trainer has gone")

    async def scenario(engine):
        failure = await failure_of(engine.update_weights(broken(), 1))
        return str(failure), (await engine.generate(ask())).weight_version

    assert serve(scenario) == ("cannot read the new weights: OSError: the trainer has gone", 0)


@pytest.mark.slow
def test_a_failure_midway_tears_the_weights(serve, ask):
    """Running and later requests fail until an update with all weights succeeds."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            caught = group.create_task(failure_of(engine.generate(ask("first", max_tokens=200))))
            await asyncio.sleep(0.05)
            update = await failure_of(engine.update_weights([("b.weight", TORN)], 1))
        later = await failure_of(engine.generate(ask()))
        part = await failure_of(engine.update_weights([("b.weight", GOOD["b.weight"])], 2))
        await engine.update_weights(GOOD.items(), 3)
        return [caught.result(), update, later], str(part), (await engine.generate(ask())).weight_version

    torn, part, version = serve(scenario)

    assert [TornWeightsError] * 3 == [type(each) for each in torn]
    assert {"a weight update failed midway: SGLang refused: cannot load b.weight"} == {str(each) for each in torn}
    assert (part, version) == (
        f"1 weights are missing, such as 'a.weight': {NO_WEIGHTS}",
        3,
    )


@pytest.mark.slow
def test_weights_that_kill_sglang(serve):
    """The error is a dead replica."""

    async def scenario(engine):
        return type(await failure_of(engine.update_weights([("b.weight", DEADLY)], 1)))

    assert serve(scenario) is ReplicaDiedError


def test_weights_need_one_copy_and_one_stage(serve):
    """SGLang asserts it, and the capability agrees."""

    async def scenario(engine):
        return engine.capabilities.weight_updates, str(await failure_of(engine.update_weights([], 1)))

    assert serve(scenario, data_parallel_size=2) == (
        False,
        "SGLang can update weights only if data_parallel_size and pipeline_parallel_size are 1",
    )


@pytest.mark.slow
def test_level_2_needs_all_weights(serve, ask):
    """Without a copy in host memory, nothing is served until a whole update."""

    async def scenario(engine):
        await engine.sleep(2)
        asleep = str(await failure_of(engine.update_weights(GOOD.items(), 1)))
        await engine.wake_up(["weights"])
        part = str(await failure_of(engine.update_weights([("a.weight", GOOD["a.weight"])], 1)))
        await engine.wake_up(["kv_cache"])
        empty = str(await failure_of(engine.generate(ask())))
        await engine.update_weights(GOOD.items(), 1)
        return engine.capabilities.sleep_levels, asleep, part, empty, (await engine.generate(ask())).weight_version

    assert serve(scenario, weights_cpu_backup=False) == (
        {2},
        "the weights of the sglang engine are asleep: wake them up before an update",
        f"1 weights are missing, such as 'b.weight': {NO_WEIGHTS}",
        "sleep level 2 freed the weights of the sglang engine: call update_weights",
        1,
    )


@pytest.mark.slow
def test_sleep_aborts_requests(serve, ask):
    """Requests keep their tokens, and a refusal names the tags that are still asleep."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.generate(ask(max_tokens=200)))
            await asyncio.sleep(0.05)
            await engine.sleep(1)
        whole = str(await failure_of(engine.generate(ask())))
        await engine.wake_up(["weights"])
        await engine.update_weights(GOOD.items(), 2)
        part = str(await failure_of(engine.generate(ask())))
        await engine.wake_up()
        return task.result().finish_reason, whole, part, (await engine.generate(ask())).weight_version

    assert serve(scenario) == (
        FinishReason.ABORT,
        "the sglang engine is asleep (level 1): wake up weights and kv_cache",
        "the sglang engine is asleep (level 1): wake up kv_cache",
        2,
    )


def test_a_cpu_has_no_sleep(serve):
    """SGLang frees memory only on a GPU."""

    async def scenario(engine):
        return engine.capabilities.sleep_levels, str(await failure_of(engine.sleep(1)))

    levels, text = serve(scenario, device="cpu")

    assert (frozenset(), "the sglang engine has no sleep level 1; it has none: they need a GPU and sleep_mode") == (
        levels,
        text,
    )


def test_a_tied_output_layer_is_not_sent():
    """State dicts contain the output layer also if it is tied to the embedding table."""
    shapes = {"model.embed_tokens.weight": (4, 2)}
    table = np.zeros((4, 2), np.float32)

    staged = stage(
        [("model.embed_tokens.weight", table), ("lm_head.weight", table)], ExpectedWeights(shapes, True), whole=True
    )

    assert {"model.embed_tokens.weight"} == staged.names
    staged.close()
    with pytest.raises(EngineError, match=r"has shape \(4, 2\), got \(8, 2\)"):
        stage([("lm_head.weight", np.zeros((8, 2), np.float32))], ExpectedWeights(shapes, True), whole=False)


def test_a_vision_language_model_gets_names_that_sglang_knows(tmp_path):
    """SGLang ignores a weight of the vision tower of Qwen2.5-VL under the name of the state dict."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    two, three = np.zeros(2, np.float32), np.zeros(3, np.float32)
    save_file({"visual.a.weight": two, "model.b.weight": three}, tmp_path / "m.safetensors")
    sent = {"model.visual.a.weight": two, "model.language_model.b.weight": three}

    staged = stage(sent.items(), expected_weights(tmp_path), whole=True, name_for_sglang=weight_names(tmp_path))

    assert {"visual.a.weight", "model.b.weight"} == staged.names
    assert weight_names(None)("model.visual.a.weight") == "model.visual.a.weight"
    staged.close()


def test_specs_of_a_source_are_checked_first(small_model):
    """A wrong spec refuses the update before the first weight is read."""

    class Source:
        specs = (type("Spec", (), {"name": "c.weight", "shape": (1,), "dtype": "float32"}),)

        def __iter__(self):
            raise AssertionError("was iterated")

    with pytest.raises(EngineError, match=r"no weight 'c\.weight'"):
        stage(Source(), ExpectedWeights(checkpoint_shapes(small_model)), whole=False)


@pytest.mark.slow
def test_a_cancelled_update_tears_the_weights(serve, ask):
    """It is unknown how much SGLang had loaded."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            update = group.create_task(engine.update_weights(GOOD.items(), 1))
            while not engine._calls:  # noqa: ASYNC110 - an engine has no event for it
                await asyncio.sleep(0)
            update.cancel()
        text = str(await failure_of(engine.generate(ask())))
        await engine.update_weights(GOOD.items(), 2)
        return text, (await engine.generate(ask())).weight_version

    assert serve(scenario) == ("a weight update was cancelled", 2)
