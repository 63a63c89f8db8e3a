"""Start, weight updates, sleep, death and stop of the engine, around a fake vLLM."""

import asyncio
import sys

import numpy as np
import pytest

from turnwise.errors import ReplicaDiedError, TornWeightsError
from turnwise.types import FinishReason
from turnwise_testing.engines.scenarios import abort_when_heard, failure_of

WEIGHTS = [("w", np.array([1.0, 2.0], np.float32))]


async def in_flight(llm, request_id="a", num_tokens=5):
    while request_id not in llm.requests or len(llm.requests[request_id].ids) < num_tokens:  # noqa: ASYNC110 - the fake has no event for it
        await asyncio.sleep(0.001)


def test_a_listener_hears_ids_before_the_end(serve, ask):
    """The first ids are heard while the others are sampled, and the result begins with them."""
    heard, result = serve(lambda engine: abort_when_heard(engine, ask(max_tokens=200)))

    assert FinishReason.ABORT == result.finish_reason
    assert heard
    assert heard == result.token_ids.tolist()[: len(heard)]


def test_an_update_pauses_loads_and_resumes(serve, llm, tmp_path):
    """vLLM loads the given values, and no file stays behind."""

    async def scenario(engine):
        await engine.update_weights(WEIGHTS, 4)
        return engine.stats()["weight_version"]

    assert 4 == serve(scenario)
    assert ["turnwise_describe", "pause", "turnwise_load", "resume", "shutdown"] == llm.calls
    assert ([1.0, 2.0], "4") == (llm.loaded["w"].tolist(), llm.version)
    assert [] == list(tmp_path.iterdir())


def test_an_update_during_a_request(serve, llm, ask):
    """The request continues, and each of its tokens has the version that sampled it."""

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
    """The update is refused before generation pauses."""

    async def scenario(engine):
        error = await failure_of(engine.update_weights([("w", np.zeros(2, np.int8))], 1))
        return str(error), (await engine.generate(ask())).weight_version

    assert ("weight 'w' must be of floating point, got int8", 0) == serve(scenario)
    assert "pause" not in llm.calls


def test_a_failure_midway_tears_the_weights(serve, llm, ask):
    """Running and later requests fail until a later update succeeds."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(failure_of(engine.generate(ask(max_tokens=200))))
            await in_flight(llm)
            llm.fail_next_load = Exception("Call to collective_rpc method failed:\nno room")
            update = await failure_of(engine.update_weights(WEIGHTS, 1))
        later = await failure_of(engine.generate(ask()))
        await engine.update_weights(WEIGHTS, 2)
        return [waiting.result(), update, later], await engine.generate(ask())

    failures, repaired = serve(scenario)

    assert [TornWeightsError] * 3 == [type(each) for each in failures]
    assert {
        "the weight update to version 1 failed midway: Exception: Call to collective_rpc method failed: no room"
    } == {str(each) for each in failures}
    assert (2, 16) == (repaired.weight_version, len(repaired.token_ids))


def test_a_cancelled_update_tears_the_weights(serve, llm, ask):
    """It is unknown how much vLLM had loaded, so the engine serves nothing."""

    async def hang(*_):
        await asyncio.sleep(60)

    async def scenario(engine):
        llm.update_weight_version = hang
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.update_weights(WEIGHTS, 1))
            while "turnwise_load" not in llm.calls:  # noqa: ASYNC110 - the fake has no event for it
                await asyncio.sleep(0.001)
            task.cancel()
        return task.cancelled(), await failure_of(engine.generate(ask()))

    cancelled, later = serve(scenario)

    assert (True, TornWeightsError) == (cancelled, type(later))


def test_dead_processes_fail_all_requests(serve, llm, ask):
    """Requests in flight, later requests and updates raise `ReplicaDiedError`."""

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


def test_an_update_that_kills_the_processes(serve, llm):
    """The error is a dead replica, not torn weights."""

    async def scenario(engine):
        llm.dead = True
        return await failure_of(engine.update_weights(WEIGHTS, 1))

    assert ReplicaDiedError is type(serve(scenario))


def test_a_refusal_of_vllm_is_one_line(serve, ask):
    """Only that request fails."""

    async def scenario(engine):
        refused = await failure_of(engine.generate(ask(top_k=13)))
        return str(refused), len((await engine.generate(ask())).token_ids)

    assert ("request 'a' was refused: FakeRefusalError: thirteen", 16) == serve(scenario)


def test_two_requests_with_one_id(serve, llm, ask):
    """`abort` could not tell them apart."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.generate(ask(max_tokens=40)))
            await in_flight(llm)
            return str(await failure_of(engine.generate(ask())))

    assert "request 'a' is in flight already" == serve(scenario)


def test_sleep_and_the_two_stages_of_waking_up(serve, llm, ask):
    """Sleep aborts requests in flight, and requests are refused until both tags are awake."""

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
        "the vllm engine is asleep (level 1): wake up weights and kv_cache",
        "the vllm engine is asleep (level 1): wake up kv_cache",
    ] == texts
    # The update neither pauses nor resumes: nothing runs while the cache is asleep.
    assert ["sleep 1", "wake ['weights']", "turnwise_load", "wake ['kv_cache']", "shutdown"] == llm.calls[1:]


def test_sleep_on_a_cpu(serve, llm, ask):
    """The workers free the memory while vLLM is paused; it resumes when both tags are awake."""

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

    assert ("the vllm engine is asleep (level 1): wake up kv_cache", 2) == (half, version)
    assert lost == "sleep level 2 freed the weights of the vllm engine: call update_weights"
    first = ["pause abort", "turnwise_free 1", "turnwise_restore weights", "turnwise_load"]
    second = ["pause abort", "turnwise_free 2", "turnwise_restore weights", "turnwise_restore kv_cache", "resume"]
    assert [*first, *second, "pause", "turnwise_load", "resume", "shutdown"] == llm.calls[1:]


def test_memory_of_the_gpus(serve):
    """`memory_bytes` is the sum over all workers, as of the last change."""

    async def scenario(engine):
        seen = [engine.stats()["memory_bytes"]]
        await engine.sleep(1)
        seen.append(engine.stats()["memory_bytes"])
        await engine.wake_up()
        return [*seen, engine.stats()["memory_bytes"]]

    assert [320, 120, 320] == serve(scenario)


@pytest.mark.own_process
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory comes from /proc")
def test_memory_on_a_cpu(serve):
    """`memory_bytes` is the current resident memory, here of this process once per fake worker."""

    async def scenario(engine):
        before = engine.stats()["memory_bytes"]
        block = np.ones(64 << 20, np.uint8)
        return engine.stats()["memory_bytes"] - before, block.nbytes

    grown, num_bytes = serve(scenario, device="cpu")

    assert grown >= 2 * 0.9 * num_bytes


def test_level_2_needs_new_weights(serve, llm, ask):
    """After waking up, requests are refused until an update has replaced all weights."""

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
        "the weights of the vllm engine are asleep: wake them up before an update",
        "sleep level 2 freed the weights of the vllm engine: call update_weights",
    ] == texts


def test_sleeping_again_while_half_awake(serve, llm):
    """vLLM can only sleep as a whole, so the other half wakes up first."""

    async def scenario(engine):
        await engine.sleep(1)
        deeper = str(await failure_of(engine.sleep(2)))
        await engine.wake_up(["weights"])
        await engine.sleep(2)
        return deeper

    assert serve(scenario) == "the vllm engine is asleep at level 1: wake up its weights before level 2"
    assert ["sleep 1", "wake ['weights']", "wake None", "sleep 2", "shutdown"] == llm.calls[1:]


@pytest.mark.parametrize(
    ("options", "level", "message"),
    [
        ({"device": "cpu", "sleep_mode": False}, 1, "has no sleep level 1; it has none: sleep_mode is off"),
        ({"sleep_mode": False}, 2, "has no sleep level 2; it has none: sleep_mode is off"),
        ({}, 3, "has no sleep level 3; it has 1 and 2"),
        ({"device": "cpu"}, 3, "has no sleep level 3; it has 1 and 2"),
    ],
)
def test_unsupported_sleep_levels(serve, options, level, message):
    """The error agrees with the capabilities."""

    async def scenario(engine):
        return str(await failure_of(engine.sleep(level)))

    assert serve(scenario, **options) == f"the vllm engine {message}"


def test_an_unknown_tag(serve):
    """The error names the valid tags."""

    async def scenario(engine):
        return str(await failure_of(engine.wake_up(["kv"])))

    assert serve(scenario) == "the vllm engine cannot wake up 'kv', only weights and kv_cache"


def test_starting_twice_is_refused(serve, llm):
    """An engine starts once, and not again after a stop."""

    async def scenario(engine):
        again = str(await failure_of(engine.start()))
        await engine.stop()
        await engine.stop()
        return again, str(await failure_of(engine.start()))

    assert ("the vllm engine has been started already", "the vllm engine was stopped") == serve(scenario)
    assert 1 == llm.calls.count("shutdown")


def test_stopping_while_starting_leaves_nothing_running(make_fake_engine, llm):
    """`start` ends vLLM's processes and raises."""

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
    """vLLM's processes end when a call fails after the launch."""

    async def broken(_version):
        raise RuntimeError("no such call")

    llm.update_weight_version = broken

    with pytest.raises(RuntimeError, match="no such call"):
        asyncio.run(make_fake_engine().start())
    assert "shutdown" == llm.calls[-1]


def test_stop_strings_need_a_tokenizer(make_fake_engine, tmp_path):
    """The option decides, or else whether the model's directory has a tokenizer."""
    assert not make_fake_engine(model=tmp_path).capabilities.stop_strings
    (tmp_path / "tokenizer.json").write_text("{}")
    assert make_fake_engine(model=tmp_path).capabilities.stop_strings
    assert not make_fake_engine(model=tmp_path, stop_strings=False).capabilities.stop_strings


def test_the_models_own_limit_counts(make_fake_engine, tmp_path):
    """It is known before the start."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 100, "vocab_size": 365}')

    assert 100 == make_fake_engine(model=tmp_path).capabilities.max_context
    assert 365 == make_fake_engine(model=tmp_path).capabilities.vocab_size
    assert 64 == make_fake_engine(model=tmp_path, max_context=64).capabilities.max_context
