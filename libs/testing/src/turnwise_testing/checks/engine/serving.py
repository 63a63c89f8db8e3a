"""
Checks of requests, as plain functions: sampling, stops, aborts, limits, start and stop.

A check takes an engine and a probe, and raises `AssertionError` with a text that describes the failure. Most get an
engine that runs; those marked `fresh` get one that was not started.
"""

from __future__ import annotations

import asyncio
from typing import Final

import numpy as np
from attrs import evolve

from turnwise.protocols import Engine
from turnwise.types import FinishReason, GenerateResult, SamplingParams
from turnwise_testing.checks.engine.check import engine_check
from turnwise_testing.probes.engine import GREEDY, EngineProbe, expect, expect_equal, expect_refusal, make_request

_NUM_ABORTS: Final = 12


@engine_check()
async def check_ids_round_trip(engine: Engine, probe: EngineProbe) -> None:
    """Ids come back as int32 within the vocabulary, one log-probability slot each; the context is left alone."""
    stated = engine.capabilities.vocab_size
    vocab_size = probe.vocab_size if stated is None else stated
    expect(0 < vocab_size <= probe.vocab_size, f"the engine states a vocabulary of {stated}, not {probe.vocab_size}")
    for prompt, context in enumerate(probe.prompts):
        request = probe.request(prompt, SamplingParams(max_tokens=8))
        result = await probe.ask(engine, request)
        expect_equal(tuple(request.token_ids.tolist()), context, "the context after the call")
        expect_equal((result.token_ids.dtype.name, result.token_ids.ndim), ("int32", 1), "dtype and axes of the ids")
        expect(len(result.token_ids) > 0, "no token was sampled")
        outside = [i for i in result.token_ids.tolist() if not 0 <= i < vocab_size]
        expect(not outside, f"ids {outside} are not in the vocabulary of {vocab_size}")
        expect_equal(len(result.logprobs), len(result.token_ids), "number of log-probabilities")


@engine_check()
async def check_length_ends_a_turn(engine: Engine, probe: EngineProbe) -> None:
    """Without stop ids exactly `max_tokens` tokens come, and the reason is `length`."""
    for max_tokens in (1, 2, 7):
        result = await probe.ask(engine, probe.request(sampling=SamplingParams(max_tokens=max_tokens)))
        expect_equal(len(result.token_ids), max_tokens, "number of tokens")
        expect_equal(result.finish_reason, FinishReason.LENGTH, "finish reason")
        expect_equal(result.stop_reason, None, "stop reason without a stop id")


@engine_check()
async def check_listener_hears_a_prefix(engine: Engine, probe: EngineProbe) -> None:
    """The ids that a listener of a request hears, if any, are the first ones of the result, in order."""
    heard: list[int] = []
    result = await probe.ask(engine, evolve(probe.request(), on_tokens=heard.extend))
    expect_equal(heard, result.token_ids.tolist()[: len(heard)], "ids that the listener heard")


@engine_check()
async def check_stop_id_ends_a_turn(engine: Engine, probe: EngineProbe) -> None:
    """A stop id ends the turn, stays in the output and is named. It is one that the model samples anyway."""
    free = (await probe.ask(engine, probe.request())).token_ids.tolist()
    stop = free[len(free) // 2]
    result = await probe.ask(engine, probe.request(sampling=GREEDY.with_(stop_token_ids=(stop,))))
    expect_equal(result.token_ids.tolist(), free[: free.index(stop) + 1], f"ids up to the stop id {stop}")
    expect_equal(result.finish_reason, FinishReason.STOP, "finish reason")
    expect_equal(result.stop_reason, stop, "stop reason")


@engine_check(needs="logprobs")
async def check_logprobs(engine: Engine, probe: EngineProbe) -> None:
    """Log-probabilities are float32, finite, at most 0, and one per id, at several temperatures."""
    for temperature in (0.0, 0.5, 1.0, 2.0):
        result = await probe.ask(engine, probe.request(sampling=SamplingParams(temperature=temperature, max_tokens=8)))
        values = result.logprobs
        expect_equal(values.dtype.name, "float32", "dtype of the log-probabilities")
        expect_equal(len(values), len(result.token_ids), "number of log-probabilities")
        expect(np.isfinite(values).all(), f"log-probabilities are not finite: {values.tolist()}")
        expect((values <= 0).all(), f"log-probabilities above 0: {values.tolist()}")


@engine_check()
async def check_concurrent_requests_keep_identity(engine: Engine, probe: EngineProbe) -> None:
    """Of many requests at once each gets its own result: its own length, and as a rule the same tokens as alone."""
    lengths = [1 + i for i in range(probe.num_concurrent)]
    requests = [probe.request(i, GREEDY.with_(max_tokens=length)) for i, length in enumerate(lengths)]
    results = await probe.ask_together(engine, requests)
    expect_equal([len(result.token_ids) for result in results], lengths, "number of tokens of each request")
    alone = [await probe.ask(engine, probe.request(i)) for i in range(len(probe.prompts))]
    same = [one.token_ids[0] == many.token_ids[0] for one, many in zip(alone, results, strict=False)]
    # A batch of another shape may round differently, so a near tie may fall otherwise; a mix-up hits nearly all.
    expect(2 * sum(same) > len(same), f"of {len(same)} prompts only {sum(same)} got the answer that they get alone")


@engine_check()
async def check_greedy_is_repeatable(engine: Engine, probe: EngineProbe) -> None:
    """Temperature 0 gives the same ids each time."""
    first = (await probe.ask(engine, probe.request())).token_ids.tolist()
    second = (await probe.ask(engine, probe.request())).token_ids.tolist()
    expect_equal(second, first, "the same greedy request again")


@engine_check(needs="seeds")
async def check_seed_is_repeatable(engine: Engine, probe: EngineProbe) -> None:
    """The same seed gives the same ids, whatever runs beside it; other seeds give others."""
    sampling = SamplingParams(temperature=1.0, max_tokens=16, seed=5)
    alone = await probe.ask(engine, probe.request(sampling=sampling))
    requests = [probe.request(sampling=sampling.with_(seed=5 + i % 4)) for i in range(12)]
    outputs = [result.token_ids.tolist() for result in await probe.ask_together(engine, requests)]
    expect_equal(outputs[::4], [alone.token_ids.tolist()] * 3, "ids of one seed")
    expect(any(each != outputs[0] for each in outputs), "all seeds gave the same ids")


@engine_check(needs="abort")
async def check_abort_returns_what_was_sampled(engine: Engine, probe: EngineProbe) -> None:
    """An aborted request ends at once with a prefix of its tokens, and frees its slot."""
    await probe.ask(engine, probe.long_request())
    started = asyncio.get_running_loop().time()
    whole = (await probe.ask(engine, probe.long_request())).token_ids.tolist()
    duration = asyncio.get_running_loop().time() - started
    delay, num_aborted, num_sampled = duration / 2, 0, 0
    # How long a request takes depends on the machine: an abort that comes too late or too early is tried again.
    for _ in range(_NUM_ABORTS):
        result = await _abort_after(engine, probe, delay)
        if result.finish_reason != FinishReason.ABORT:
            delay /= 2
            continue
        ids = result.token_ids.tolist()
        expect_equal(ids, whole[: len(ids)], "ids of an aborted request")
        expect_equal(len(result.logprobs), len(ids), "number of log-probabilities of an aborted request")
        num_aborted, num_sampled = num_aborted + 1, num_sampled + len(ids)
        if num_sampled:
            break
        delay *= 1.5
    expect(bool(num_aborted), f"no request of {_NUM_ABORTS} was aborted in flight")
    expect(bool(num_sampled), "the tokens sampled before the abort are lost")
    await check_serves_when_idle(engine, probe)


async def _abort_after(engine: Engine, probe: EngineProbe, seconds: float) -> GenerateResult:
    request = probe.long_request()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(probe.ask(engine, request))
        await asyncio.sleep(seconds)
        await engine.abort(request.request_id)
    return task.result()


@engine_check()
async def check_abort_of_unknown_is_ignored(engine: Engine, probe: EngineProbe) -> None:
    """Aborting an id that is unknown, or has ended, does nothing."""
    request = probe.request()
    await engine.abort("no such request")
    await probe.ask(engine, request)
    await engine.abort(request.request_id)
    await check_serves_when_idle(engine, probe)


@engine_check()
async def check_cancelling_frees_the_slot(engine: Engine, probe: EngineProbe) -> None:
    """A cancelled `generate` leaves nothing running, and its id can be used again."""
    request = probe.long_request()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(engine.generate(request))
        await probe.settles(engine, 1)
        task.cancel()
    expect(task.cancelled(), "generate swallowed its cancellation")
    await probe.settles(engine, 0)
    again = await probe.ask(engine, request)
    expect_equal(len(again.token_ids), probe.num_long_tokens, "number of tokens when the id is used again")


@engine_check()
async def check_serves_when_idle(engine: Engine, probe: EngineProbe) -> None:
    """Nothing runs once all requests have ended, and a new one is served."""
    await probe.settles(engine, 0)
    result = await probe.ask(engine, probe.request())
    expect_equal(len(result.token_ids), GREEDY.max_tokens, "number of tokens")
    await probe.settles(engine, 0)


@engine_check()
async def check_stats_count_what_runs(engine: Engine, probe: EngineProbe) -> None:
    """`num_running` rises to the number of requests in flight and falls back to 0."""
    expect_equal(engine.stats()["num_running"], 0, "num_running of an idle engine")
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(probe.ask(engine, probe.long_request()))
        await probe.settles(engine, 3)
    expect_equal(engine.stats()["num_running"], 0, "num_running after the last answer")


@engine_check()
async def check_empty_context_is_refused(engine: Engine, probe: EngineProbe) -> None:
    """A request without a context raises `EngineError`, and the engine lives on."""
    await expect_refusal(engine.generate(make_request("empty", (), GREEDY)), "an empty context")
    await check_serves_when_idle(engine, probe)


@engine_check(needs="max_context")
async def check_too_long_context_is_refused(engine: Engine, probe: EngineProbe) -> None:
    """A context of more than `max_context` tokens raises `EngineError`, and the engine lives on."""
    num_tokens = (engine.capabilities.max_context or 0) + 1
    request = make_request("long", [1] * num_tokens, GREEDY)
    await expect_refusal(engine.generate(request), f"a context of {num_tokens} tokens")
    await check_serves_when_idle(engine, probe)


@engine_check(needs="max_context")
async def check_output_stays_in_max_context(engine: Engine, probe: EngineProbe) -> None:
    """Context and output together never pass `max_context`: the output is cut, with `length`."""
    room = 3
    context = np.resize(np.array(probe.prompts[0]), (engine.capabilities.max_context or 0) - room).tolist()
    result = await probe.ask(engine, make_request("full", context, SamplingParams(max_tokens=room + 50)))
    expect(len(result.token_ids) <= room, f"{len(context)} and {len(result.token_ids)} tokens pass max_context")
    expect_equal(result.finish_reason, FinishReason.LENGTH, "finish reason")
    await check_serves_when_idle(engine, probe)


@engine_check(fresh=True)
async def check_generate_before_start_is_refused(engine: Engine, probe: EngineProbe) -> None:
    """A request to an engine that was not started raises `EngineError`, and it can be stopped."""
    await expect_refusal(engine.generate(probe.request()), "a request before start")
    await engine.stop()


@engine_check(fresh=True)
async def check_start_keeps_the_capabilities(engine: Engine, probe: EngineProbe) -> None:
    """Capabilities are the same before and after `start`."""
    before = engine.capabilities
    await engine.start()
    expect_equal(engine.capabilities, before, "capabilities after start")


@engine_check(fresh=True)
async def check_stop_twice_is_harmless(engine: Engine, probe: EngineProbe) -> None:
    """`stop` may be called again, and a request after it raises `EngineError`."""
    await engine.start()
    await probe.ask(engine, probe.request())
    await engine.stop()
    await engine.stop()
    await expect_refusal(engine.generate(probe.request()), "a request after stop")


@engine_check(fresh=True, needs="abort")
async def check_stop_ends_what_is_in_flight(engine: Engine, probe: EngineProbe) -> None:
    """Requests in flight end with `abort` when the engine is stopped; none hangs."""
    await engine.start()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(probe.ask(engine, probe.long_request())) for _ in range(3)]
        await probe.settles(engine, 3)
        await probe.within(engine.stop(), "stop")
    reasons = [task.result().finish_reason for task in tasks]
    expect_equal(reasons, [FinishReason.ABORT] * 3, "finish reasons of requests in flight at stop")
