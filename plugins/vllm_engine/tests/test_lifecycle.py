"""How the engine starts, changes weights, sleeps, dies and stops, around a vLLM without a model."""

import asyncio
import sys

import numpy as np
import pytest

from turnwise.errors import EngineError, ReplicaDiedError, TornWeightsError
from turnwise.types import FinishReason

WEIGHTS = [("w", np.array([1.0, 2.0], np.float32))]


async def failure_of(awaitable):
    with pytest.raises(EngineError) as caught:
        await awaitable
    return caught.value


async def in_flight(llm, request_id="a", num_tokens=5):
    while request_id not in llm.requests or len(llm.requests[request_id].ids) < num_tokens:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.001)


def test_an_update_pauses_loads_and_resumes(serve, llm, tmp_path):
    """In this order, with the numbers that were given, and nothing is left on the disk."""

    async def scenario(engine):
        await engine.update_weights(WEIGHTS, 4)
        return engine.stats()["weight_version"]

    assert 4 == serve(scenario)
    assert ["turnwise_describe", "pause", "turnwise_load", "resume", "shutdown"] == llm.calls
    assert ([1.0, 2.0], "4") == (llm.loaded["w"].tolist(), llm.version)
    assert [] == list(tmp_path.iterdir())


def test_an_update_in_mid_flight(serve, llm, ask):
    """The request goes on, and its tokens say from which on they are of the new weights."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.generate(ask(max_tokens=60)))
            await in_flight(llm, num_tokens=20)
            await engine.update_weights(WEIGHTS, 3)
        return task.result(), await engine.generate(ask())

    mixed, after = serve(scenario)

    num_old = int((mixed.weight_version == 0).sum())
    assert [0] * num_old + [3] * (60 - num_old) == mixed.weight_version.tolist()
    assert 20 <= num_old < 60
    assert 3 == after.weight_version


def test_bad_weights_change_nothing(serve, llm, ask):
    """They are refused before generation is paused."""

    async def scenario(engine):
        error = await failure_of(engine.update_weights([("w", np.zeros(2, np.int8))], 1))
        return str(error), (await engine.generate(ask())).weight_version

    assert ("weight 'w' must be of floating point, got int8", 0) == serve(scenario)
    assert "pause" not in llm.calls


def test_a_failure_half_way_tears_the_weights(serve, llm, ask):
    """What waits fails, so does what comes, and a later update mends it."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(failure_of(engine.generate(ask(max_tokens=200))))
            await in_flight(llm)
            llm.fail_next_load = Exception("Call to collective_rpc method failed:\nno room")
            update = await failure_of(engine.update_weights(WEIGHTS, 1))
        later = await failure_of(engine.generate(ask()))
        await engine.update_weights(WEIGHTS, 2)
        return [waiting.result(), update, later], await engine.generate(ask())

    failures, mended = serve(scenario)

    assert [TornWeightsError] * 3 == [type(each) for each in failures]
    assert {
        "the weight update to version 1 failed half-way: Exception: Call to collective_rpc method failed: no room"
    } == {str(each) for each in failures}
    assert (2, 16) == (mended.weight_version, len(mended.token_ids))


def test_a_cancelled_update_is_not_taken_for_a_whole_one(serve, llm, ask):
    """Nobody knows what vLLM has done by then, so the engine serves nothing."""

    async def hang(*_):
        await asyncio.sleep(60)

    async def scenario(engine):
        llm.update_weight_version = hang
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.update_weights(WEIGHTS, 1))
            while "turnwise_load" not in llm.calls:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.001)
            task.cancel()
        return task.cancelled(), await failure_of(engine.generate(ask()))

    cancelled, later = serve(scenario)

    assert (True, TornWeightsError) == (cancelled, type(later))


def test_dead_processes_leave_nobody_waiting(serve, llm, ask):
    """Requests in flight, later ones and updates raise what the runtime takes for a dead replica."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(failure_of(engine.generate(ask(str(i), max_tokens=200)))) for i in range(3)]
            await in_flight(llm, "2")
            llm.dead = True
        later = [await failure_of(engine.generate(ask())), await failure_of(engine.update_weights(WEIGHTS, 1))]
        return [task.result() for task in waiting] + later, engine.stats()["num_running"]

    failures, num_running = serve(scenario)

    assert [ReplicaDiedError] * 5 == [type(each) for each in failures]
    assert {"vLLM's processes have ended: FakeDeadError: the engine is gone"} == {str(each) for each in failures}
    assert 0 == num_running


def test_processes_that_die_of_an_update(serve, llm):
    """That is a death, not torn weights."""

    async def scenario(engine):
        llm.dead = True
        return await failure_of(engine.update_weights(WEIGHTS, 1))

    assert ReplicaDiedError is type(serve(scenario))


def test_what_vllm_refuses_is_one_line(serve, ask):
    """The request is at fault, and the engine lives on."""

    async def scenario(engine):
        refused = await failure_of(engine.generate(ask(top_k=13)))
        return str(refused), len((await engine.generate(ask())).token_ids)

    assert ("request 'a' was refused: FakeRefusalError: thirteen", 16) == serve(scenario)


def test_two_requests_of_one_name(serve, llm, ask):
    """An abort would not know which."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.generate(ask(max_tokens=40)))
            await in_flight(llm)
            return str(await failure_of(engine.generate(ask())))

    assert "request 'a' is in flight already" == serve(scenario)


def test_sleep_and_the_two_stages_of_waking_up(serve, llm, ask):
    """Weights first; requests in flight end, and none is taken before both are there."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.generate(ask(max_tokens=200)))
            await in_flight(llm)
            await engine.sleep(1)
        texts = [str(await failure_of(engine.generate(ask())))]
        await engine.wake_up(["weights"])
        await engine.update_weights(WEIGHTS, 1)
        texts.append(str(await failure_of(engine.generate(ask()))))
        await engine.wake_up()
        await engine.wake_up()
        return task.result().finish_reason, texts, (await engine.generate(ask())).weight_version

    reason, texts, version = serve(scenario)

    assert (FinishReason.ABORT, 1) == (reason, version)
    assert [
        "the vllm engine is asleep: wake up kv_cache and weights",
        "the vllm engine is asleep: wake up kv_cache",
    ] == texts
    # No pause and no resume in between: there is no cache that could be used.
    assert ["sleep 1", "wake ['weights']", "turnwise_load", "wake ['kv_cache']", "shutdown"] == llm.calls[1:]


def test_on_a_cpu_the_workers_free_the_memory(serve, llm, ask):
    """vLLM stands still meanwhile, and goes on when both are there; it could free nothing itself."""

    async def scenario(engine):
        await engine.sleep(1)
        await engine.wake_up(["weights"])
        await engine.update_weights(WEIGHTS, 1)
        half = str(await failure_of(engine.generate(ask())))
        await engine.sleep(2)
        await engine.wake_up()
        lost = str(await failure_of(engine.generate(ask())))
        await engine.update_weights(WEIGHTS, 2)
        return half, lost, (await engine.generate(ask())).weight_version

    half, lost, version = serve(scenario, device="cpu")

    assert ("the vllm engine is asleep: wake up kv_cache", 2) == (half, version)
    assert lost == "the vllm engine's weights were dropped by sleep level 2: update_weights brings new ones"
    first = ["pause abort", "turnwise_drop 1", "turnwise_take weights", "turnwise_load"]
    second = ["pause abort", "turnwise_drop 2", "turnwise_take weights", "turnwise_take kv_cache", "resume"]
    assert [*first, *second, "pause", "turnwise_load", "resume", "shutdown"] == llm.calls[1:]


def test_what_the_gpus_hold_is_told(serve):
    """All of them together, as of the last time that it can have changed."""

    async def scenario(engine):
        told = [engine.stats()["memory_bytes"]]
        await engine.sleep(1)
        told.append(engine.stats()["memory_bytes"])
        await engine.wake_up()
        return [*told, engine.stats()["memory_bytes"]]

    assert [320, 120, 320] == serve(scenario)


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is told by /proc")
def test_on_a_cpu_the_memory_of_the_workers_is_told(serve):
    """What is resident at the time of asking: here of this process, once for each worker."""

    async def scenario(engine):
        before = engine.stats()["memory_bytes"]
        block = np.ones(64 << 20, np.uint8)
        return engine.stats()["memory_bytes"] - before, block.nbytes

    grown, num_bytes = serve(scenario, device="cpu")

    assert grown >= 2 * 0.9 * num_bytes


def test_level_2_needs_new_weights(serve, llm, ask):
    """Awake is not enough: the memory holds nothing until an update has filled it."""

    async def scenario(engine):
        await engine.sleep(2)
        await engine.sleep(1)
        asleep = await failure_of(engine.update_weights(WEIGHTS, 1))
        await engine.wake_up()
        empty = await failure_of(engine.generate(ask()))
        await engine.update_weights(WEIGHTS, 1)
        return [str(asleep), str(empty)], (await engine.generate(ask())).weight_version

    texts, version = serve(scenario)

    assert 1 == version
    assert [
        "the vllm engine's weights are asleep: wake them up before an update",
        "the vllm engine's weights were dropped by sleep level 2: update_weights brings new ones",
    ] == texts


def test_sleeping_again_when_half_awake(serve, llm):
    """vLLM sleeps as a whole, so the rest is woken first."""

    async def scenario(engine):
        await engine.sleep(1)
        deeper = str(await failure_of(engine.sleep(2)))
        await engine.wake_up(["weights"])
        await engine.sleep(2)
        return deeper

    assert serve(scenario) == "the vllm engine is asleep at level 1: wake its weights up before level 2"
    assert ["sleep 1", "wake ['weights']", "wake None", "sleep 2", "shutdown"] == llm.calls[1:]


@pytest.mark.parametrize(
    ("options", "level", "message"),
    [
        ({"device": "cpu", "sleep_mode": False}, 1, "cannot sleep at level 1: sleep_mode is off"),
        ({"sleep_mode": False}, 2, "cannot sleep at level 2: sleep_mode is off"),
        ({}, 3, "cannot sleep at level 3: only 1, 2"),
        ({"device": "cpu"}, 3, "cannot sleep at level 3: only 1, 2"),
    ],
)
def test_levels_that_there_are_not(serve, options, level, message):
    """One line, as the capabilities say."""

    async def scenario(engine):
        return str(await failure_of(engine.sleep(level)))

    assert serve(scenario, **options) == f"the vllm engine {message}"


def test_an_unknown_tag(serve):
    """One line that names those that there are."""

    async def scenario(engine):
        return str(await failure_of(engine.wake_up(["kv"])))

    assert serve(scenario) == "the vllm engine has no tag 'kv' to wake up, only weights and kv_cache"


def test_starting_twice_is_refused(serve, llm):
    """An engine is started once, and not again after it was stopped."""

    async def scenario(engine):
        again = str(await failure_of(engine.start()))
        await engine.stop()
        await engine.stop()
        return again, str(await failure_of(engine.start()))

    assert ("the vllm engine has been started already", "the vllm engine was stopped") == serve(scenario)
    assert 1 == llm.calls.count("shutdown")


def test_stopping_while_starting_leaves_nothing_running(make_fake_engine, llm):
    """vLLM's processes are ended, and `start` says why."""

    async def scenario():
        engine = make_fake_engine()
        async with asyncio.TaskGroup() as group:
            start = group.create_task(failure_of(engine.start()))
            await asyncio.sleep(0)
            await engine.stop()
        return str(start.result())

    assert "the vllm engine was stopped while it was starting" == asyncio.run(scenario())
    assert "shutdown" == llm.calls[-1]


def test_a_start_that_fails_leaves_nothing_running(make_fake_engine, llm):
    """vLLM answered, but not as it should."""

    async def broken(_version):
        raise RuntimeError("no such call")

    llm.update_weight_version = broken

    with pytest.raises(RuntimeError, match="no such call"):
        asyncio.run(make_fake_engine().start())
    assert "shutdown" == llm.calls[-1]


def test_stop_strings_need_a_tokenizer(make_fake_engine, tmp_path):
    """The capability says what the model's directory brings, unless the option does."""
    assert not make_fake_engine(model=tmp_path).capabilities.stop_strings
    (tmp_path / "tokenizer.json").write_text("{}")
    assert make_fake_engine(model=tmp_path).capabilities.stop_strings
    assert not make_fake_engine(model=tmp_path, stop_strings=False).capabilities.stop_strings


def test_the_models_own_limit_holds(make_fake_engine, tmp_path):
    """It is known before anything is loaded."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 100}')

    assert 100 == make_fake_engine(model=tmp_path).capabilities.max_context
    assert 64 == make_fake_engine(model=tmp_path, max_context=64).capabilities.max_context
