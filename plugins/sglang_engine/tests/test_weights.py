"""New weights on their way into SGLang, whole or not at all, and what sleeps meanwhile."""

import asyncio

import ml_dtypes
import numpy as np
import pytest
import torch

from turnwise.errors import EngineError, ReplicaDiedError, TornWeightsError
from turnwise.types import FinishReason
from turnwise_sglang_engine.staging import Expected, checkpoint_shapes, stage

GOOD = {"a.weight": np.full((2, 3), 2.0, np.float32), "b.weight": np.ones(4, np.float32)}
TORN, DEADLY = np.full(4, -13.0, np.float32), np.full(4, -14.0, np.float32)
"""Weights at which the pretended SGLang says no, and dies."""


async def failure_of(awaitable):
    with pytest.raises(EngineError) as caught:
        await awaitable
    return caught.value


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
    """The pretended model adds up its last weight; each value is exact in each dtype."""

    async def scenario(engine):
        before = await engine.generate(ask(max_tokens=1))
        await engine.update_weights([("a.weight", array)], 4)
        return before, await engine.generate(ask(max_tokens=1))

    before, after = serve(scenario)

    assert (0, 4) == (before.weight_version, after.weight_version)
    assert 15 == (after.token_ids[0] - before.token_ids[0]) % 512
    assert 0 == after.num_cached_tokens


def test_buckets_are_as_large_as_asked(serve, ask):
    """Weights that come one per bucket arrive as well, and one version comes of it."""

    async def scenario(engine):
        await engine.update_weights(iter(GOOD.items()), 5)
        return await engine.generate(ask(max_tokens=1))

    results = [serve(scenario, weight_bucket_bytes=size) for size in (1, 1 << 20)]

    assert [5, 5] == [each.weight_version for each in results]
    assert results[0].token_ids.tolist() == results[1].token_ids.tolist()


def test_requests_in_flight_wait_and_go_on(serve, ask):
    """Each token says which weights it is of."""

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
    """One bad weight refuses all of them."""

    async def scenario(engine):
        with pytest.raises(EngineError, match=message):
            await engine.update_weights([("a.weight", GOOD["a.weight"]), (name, array)], 1)
        return await engine.generate(ask())

    assert serve(scenario).weight_version == 0


def test_a_source_that_breaks_off_changes_nothing(serve, ask):
    """Whatever it raises."""

    def broken():
        yield "a.weight", GOOD["a.weight"]
        raise OSError("the trainer has gone")

    async def scenario(engine):
        failure = await failure_of(engine.update_weights(broken(), 1))
        return str(failure), (await engine.generate(ask())).weight_version

    assert serve(scenario) == ("the weights could not be read: OSError: the trainer has gone", 0)


def test_half_an_update_serves_nobody_until_a_whole_one(serve, ask):
    """Requests in flight and later ones raise; a part of the weights does not mend it."""

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
    assert {"a weight update failed half-way: SGLang refused: cannot load b.weight"} == {str(each) for each in torn}
    assert (part, version) == ("1 weights are missing, such as 'a.weight': the model holds none", 3)


def test_weights_that_kill_sglang_take_the_replica_out(serve):
    """The process is gone, and so is the replica."""

    async def scenario(engine):
        return type(await failure_of(engine.update_weights([("b.weight", DEADLY)], 1)))

    assert serve(scenario) is ReplicaDiedError


def test_weights_need_one_copy_and_one_stage(serve):
    """SGLang asserts it; the capability says it."""

    async def scenario(engine):
        return engine.capabilities.weight_updates, str(await failure_of(engine.update_weights([], 1)))

    assert serve(scenario, data_parallel_size=2) == (
        False,
        "SGLang takes weights with data_parallel_size and pipeline_parallel_size 1 only",
    )


def test_level_2_wants_all_weights(serve, ask):
    """Without a copy in host memory nothing serves before a whole update."""

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
        "the weights are asleep: wake them up before an update",
        "1 weights are missing, such as 'b.weight': the model holds none",
        "the sglang engine dropped its weights when it went asleep: update them first",
        1,
    )


def test_sleep_ends_requests_and_stages_of_waking_are_told(serve, ask):
    """What runs is aborted with what it had; the refusal names what still sleeps."""

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
        "the sglang engine is asleep: wake up kv_cache, weights",
        "the sglang engine is asleep: wake up kv_cache",
        2,
    )


def test_a_cpu_has_no_sleep(serve):
    """Freeing memory there is not what SGLang does."""

    async def scenario(engine):
        return engine.capabilities.sleep_levels, str(await failure_of(engine.sleep(1)))

    levels, text = serve(scenario, device="cpu")

    assert (frozenset(), "the sglang engine has no sleep level 1; it has none: they need a GPU and sleep_mode") == (
        levels,
        text,
    )


def test_tied_weights_may_come_and_stay_out():
    """State dicts name the output layer also when it is the input's table."""
    shapes = {"model.embed_tokens.weight": (4, 2)}
    table = np.zeros((4, 2), np.float32)

    staged = stage(
        [("model.embed_tokens.weight", table), ("lm_head.weight", table)], Expected(shapes, True), whole=True
    )

    assert {"model.embed_tokens.weight"} == staged.names
    staged.close()
    with pytest.raises(EngineError, match=r"has shape \(4, 2\), got \(8, 2\)"):
        stage([("lm_head.weight", np.zeros((8, 2), np.float32))], Expected(shapes, True), whole=False)


def test_what_a_source_says_of_itself_is_checked_first(small_model):
    """Nothing is asked of its iterator."""

    class Source:
        specs = (type("Spec", (), {"name": "c.weight", "shape": (1,), "dtype": "float32"}),)

        def __iter__(self):
            raise AssertionError("was iterated")

    with pytest.raises(EngineError, match=r"no weight 'c\.weight'"):
        stage(Source(), Expected(checkpoint_shapes(small_model)), whole=False)


def test_a_cancelled_update_serves_nobody_until_a_whole_one(serve, ask):
    """How it ended is not known; it may have changed a part."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            update = group.create_task(engine.update_weights(GOOD.items(), 1))
            while not engine._answers:  # noqa: ASYNC110 - an engine has no event for it
                await asyncio.sleep(0)
            update.cancel()
        text = str(await failure_of(engine.generate(ask())))
        await engine.update_weights(GOOD.items(), 2)
        return text, (await engine.generate(ask())).weight_version

    assert serve(scenario) == ("a weight update was cancelled", 2)
