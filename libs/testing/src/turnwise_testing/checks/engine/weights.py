"""
Checks of weights and memory: updates, versions, failures, sleep and wake.

Checks with a reference replay sampled tokens on the model of the version that the engine reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from turnwise.errors import EngineError, TornWeightsError
from turnwise.protocols import Engine
from turnwise.types import FinishReason, FloatArray, GenerateRequest, GenerateResult
from turnwise_testing.checks.engine.check import engine_check
from turnwise_testing.checks.engine.token_versions import expect_versions
from turnwise_testing.probes.engine import GREEDY, EngineProbe, expect, expect_equal, expect_refusal


@engine_check()
async def check_weight_versions(engine: Engine, probe: EngineProbe) -> None:
    """A result's weight version is an integer from 0, or one for each id."""
    result = await probe.ask(engine, probe.request())
    version = result.weight_version
    if isinstance(version, np.ndarray):
        expect_equal((version.dtype.name, version.shape), ("int32", result.token_ids.shape), "dtype and shape")
    else:
        expect_equal(type(version), int, "type of the weight version")
    expect((np.asarray(version) >= 0).all(), f"weight version {version}")


@engine_check(needs="weight_updates")
async def check_weight_update_changes_the_version(engine: Engine, probe: EngineProbe) -> None:
    """After `update_weights` results carry the new version."""
    for version in (7, 8):
        await engine.update_weights(probe.weights(), version)
        result = await probe.ask(engine, probe.request())
        expect_equal(set(np.atleast_1d(result.weight_version).tolist()), {version}, "weight versions")


@engine_check(needs="logprobs", reference=True)
async def check_logprobs_are_those_of_the_model(engine: Engine, probe: EngineProbe) -> None:
    """Log-probabilities belong to the sampled distribution, as a float32 forward pass computes it."""
    errors = []
    for temperature in (1.0, 0.7):
        sampling = GREEDY.with_(temperature=temperature, max_tokens=16)
        requests = [probe.request(i, sampling) for i in range(len(probe.prompts))]
        for request, result in zip(requests, await probe.ask_together(engine, requests), strict=True):
            chosen, _best = _scores(probe, request, result, temperature=temperature)
            errors.append(float(np.abs(chosen - result.logprobs).max()))
    probe.measured["logprob_error"] = max(errors)
    expect(max(errors) <= probe.logprob_bound, f"log-probabilities are off by {max(errors):.3g} nats")


@engine_check(needs="weight_updates", reference=True)
async def check_weight_update_changes_the_output(engine: Engine, probe: EngineProbe) -> None:
    """After an update greedy output is exactly the new weights' output; a second update restores the old one."""
    before = await probe.ask(engine, probe.request())
    async with _changed(engine, probe) as version:
        results = await probe.ask_together(engine, [probe.request(i) for i in range(len(probe.prompts))])
        for i, result in enumerate(results):
            _expect_greedy(probe, probe.request(i), result, {version: True})
        expect(results[0].token_ids.tolist() != before.token_ids.tolist(), "the reference's weights change nothing")
    after = await probe.ask(engine, probe.request())
    expect_equal(after.token_ids.tolist(), before.token_ids.tolist(), "greedy ids with the first weights again")


@engine_check(needs="weight_updates", reference=True)
async def check_no_stale_prefix_after_an_update(engine: Engine, probe: EngineProbe) -> None:
    """A context that was cached under the old weights is read again under the new ones."""
    for _ in range(2):
        await probe.ask(engine, probe.prefix_request())
    async with _changed(engine, probe) as version:
        for _ in range(2):
            request = probe.prefix_request()
            _expect_greedy(probe, request, await probe.ask(engine, request), {version: True})
    request = probe.prefix_request()
    result = await probe.ask(engine, request)
    _expect_greedy(probe, request, result, {_version_of(result): False})


@engine_check(needs="weight_updates", reference=True)
async def check_update_in_flight_marks_each_token(engine: Engine, probe: EngineProbe) -> None:
    """An update in mid-flight: each token is greedy under the weights of the version that it claims."""
    started = asyncio.get_running_loop().time()
    old = _version_of(await probe.ask(engine, probe.long_request()))
    duration, kinds = asyncio.get_running_loop().time() - started, {old: False}
    num_mixed = 0
    for attempt in range(1, 7):
        request, changed = probe.long_request(), attempt % 2 == 1
        async with asyncio.TaskGroup() as group:
            task = group.create_task(probe.ask(engine, request))
            await probe.settles(engine, 1)
            await asyncio.sleep(duration * (0.2 + 0.1 * (attempt % 4)))
            kinds[old + attempt] = changed
            await _update(engine, probe, old + attempt, changed=changed)
        _expect_greedy(probe, request, task.result(), kinds)
        num_mixed += np.unique(task.result().weight_version).size > 1
    expect(num_mixed > 0, "no request of six saw an update in flight: none has tokens of two versions")


@engine_check(needs="weight_updates", reference=True)
async def check_failed_update_changes_nothing(engine: Engine, probe: EngineProbe) -> None:
    """A wrong name or shape, or a source that breaks off, leaves the old version, or none, serving."""
    before = await probe.ask(engine, probe.request())
    version = _version_of(before)
    weights = list(_weights(probe, changed=True))
    name, array = weights[-1]
    bad = {
        "an unknown name": [*weights, ("no.such.weight", array)],
        "another shape": [*weights[:-1], (name, np.concatenate([np.asarray(array)] * 2))],
        "a source that breaks off": _broken_off(weights[:-1]),
    }
    for fault, broken in bad.items():
        try:
            await engine.update_weights(broken, version + 1)
        except TornWeightsError:
            await expect_refusal(engine.generate(probe.request()), f"a request after {fault} tore the weights")
            await _update(engine, probe, version, changed=False)
        except EngineError:
            pass
        else:
            raise AssertionError(f"an update with {fault} raised no EngineError")
        after = await probe.ask(engine, probe.request())
        expect_equal(after.token_ids.tolist(), before.token_ids.tolist(), f"greedy ids after {fault}")
        expect_equal(_version_of(after), version, f"weight version after {fault}")


@engine_check(sleep_level=1)
async def check_sleep_and_wake_up(engine: Engine, probe: EngineProbe) -> None:
    """Level 1 refuses requests until it is woken; twice is once; the weights are as before."""
    before = (await probe.ask(engine, probe.request())).token_ids.tolist()
    await engine.sleep(1)
    await engine.sleep(1)
    await expect_refusal(engine.generate(probe.request()), "a request to a sleeping engine")
    await engine.wake_up()
    await engine.wake_up()
    after = (await probe.ask(engine, probe.request())).token_ids.tolist()
    expect_equal(after, before, "a greedy request after the sleep")


@engine_check(sleep_level=1)
async def check_generate_while_asleep_says_so(engine: Engine, probe: EngineProbe) -> None:
    """The error of a request to a sleeping engine says "asleep", also between the two stages of waking up."""
    before = (await probe.ask(engine, probe.request())).token_ids.tolist()
    await engine.sleep(1)
    await expect_refusal(engine.generate(probe.request()), "a request to a sleeping engine", "asleep")
    await engine.wake_up(("weights",))
    await expect_refusal(engine.generate(probe.request()), "a request while the KV cache sleeps", "asleep")
    await engine.wake_up(("kv_cache",))
    after = (await probe.ask(engine, probe.request())).token_ids.tolist()
    expect_equal(after, before, "a greedy request after waking up in two stages")


@engine_check(sleep_level=1)
async def check_wrong_sleep_calls_are_refused(engine: Engine, probe: EngineProbe) -> None:
    """An unknown level or tag, and weights into memory that sleeps, raise `EngineError`; the engine lives on."""
    await expect_refusal(engine.sleep(9), "sleep level 9")
    await engine.sleep(1)
    await expect_refusal(engine.wake_up(("no such tag",)), "an unknown tag")
    if engine.capabilities.weight_updates:
        await expect_refusal(engine.update_weights(probe.weights(), 99), "an update while the weights sleep")
    await engine.wake_up()
    await probe.ask(engine, probe.request())


@engine_check(sleep_level=1, needs="abort")
async def check_sleep_ends_what_is_in_flight(engine: Engine, probe: EngineProbe) -> None:
    """Requests in flight end with `abort` and their tokens when the engine goes to sleep; none hangs."""
    whole = (await probe.ask(engine, probe.long_request())).token_ids.tolist()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(probe.ask(engine, probe.long_request())) for _ in range(3)]
        await probe.settles(engine, 3)
        await probe.within(engine.sleep(1), "sleep")
    for result in (task.result() for task in tasks):
        ids = result.token_ids.tolist()
        expect_equal(result.finish_reason, FinishReason.ABORT, "finish reason of requests in flight at sleep")
        expect_equal(ids, whole[: len(ids)], "ids of requests in flight at sleep")
    await engine.wake_up()
    await probe.ask(engine, probe.request())


@engine_check(sleep_level=2, needs="weight_updates", reference=True)
async def check_level_2_serves_what_it_is_given(engine: Engine, probe: EngineProbe) -> None:
    """After level 2 the engine serves the weights of an update between the two stages of waking up."""
    before = await probe.ask(engine, probe.request())
    version = _version_of(before)
    for step, changed in enumerate((True, False), start=1):
        await engine.sleep(2)
        await expect_refusal(engine.generate(probe.request()), "a request to a sleeping engine", "asleep")
        await engine.wake_up(("weights",))
        await _update(engine, probe, version + step, changed=changed)
        await engine.wake_up(("kv_cache",))
        request = probe.request()
        _expect_greedy(probe, request, await probe.ask(engine, request), {version + step: changed})


def _weights(probe: EngineProbe, *, changed: bool) -> Iterable[tuple[str, Any]]:
    if probe.reference is None:
        raise AssertionError("the probe has no reference")
    return probe.reference.weights(variant=int(changed))


async def _update(engine: Engine, probe: EngineProbe, version: int, *, changed: bool) -> None:
    await probe.within(engine.update_weights(_weights(probe, changed=changed), version), "a weight update")


@asynccontextmanager
async def _changed(engine: Engine, probe: EngineProbe) -> AsyncIterator[int]:
    """Let the engine have the reference's other weights for a while; the value is their version."""
    version = _version_of(await probe.ask(engine, probe.request())) + 1
    await _update(engine, probe, version, changed=True)
    try:
        yield version
    finally:
        await _update(engine, probe, version + 1, changed=False)


def _version_of(result: GenerateResult) -> int:
    """Return the version of a result's last token."""
    return int(np.atleast_1d(result.weight_version)[-1])


def _scores(
    probe: EngineProbe, request: GenerateRequest, result: GenerateResult, *, temperature: float, changed: bool = False
) -> tuple[FloatArray, FloatArray]:
    if probe.reference is None:
        raise AssertionError("the probe has no reference")
    ids = [*request.token_ids.tolist(), *result.token_ids.tolist()]
    return probe.reference.scores(ids, len(request.token_ids), temperature=temperature, variant=int(changed))


def _expect_greedy(
    probe: EngineProbe, request: GenerateRequest, result: GenerateResult, kinds: Mapping[int, bool]
) -> None:
    """Expect that each token is the most likely one, or a tie, under the weights of the version that it claims."""
    expect_versions(probe, [(request, result)], {version: int(changed) for version, changed in kinds.items()})


def _broken_off(weights: Iterable[tuple[str, object]]) -> Iterator[tuple[str, Any]]:
    yield from weights
    raise OSError("the publisher died")
