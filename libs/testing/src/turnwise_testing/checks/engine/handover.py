"""
Checks of calls that meet: requests around an update, and updates and sleeps that are cancelled.

They hold in every order of events, so `turnwise_testing.checks.engine.delays` runs them under delays too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
from attrs import define, field

from turnwise.errors import AsleepError, EngineError
from turnwise.protocols import Engine
from turnwise.types import GenerateRequest, GenerateResult, SamplingParams
from turnwise_testing.checks.engine.check import engine_check
from turnwise_testing.checks.engine.token_versions import expect_versions
from turnwise_testing.probes.engine import EngineProbe, expect

_PAUSE_S: Final = 0.004
"""Seconds between two requests around an update."""
_LATE_S: Final = 0.1
"""Seconds by which the source of a cancelled update is late."""
_WATCHDOG_S: Final = 60.0


@engine_check(needs="weight_updates", reference=True)
async def check_requests_around_an_update(engine: Engine, probe: EngineProbe) -> None:
    """Requests that arrive before, in and after an update: each token comes from the weights that it claims."""
    first = await _version(engine, probe)
    variants, answers = {first: 0}, list[tuple[GenerateRequest, GenerateResult]]()
    async with asyncio.TaskGroup() as group:
        for step in range(1, 4):
            variants[first + step] = step
            update = group.create_task(_update(engine, probe, first + step, variant=step))
            for number in range(6):
                group.create_task(_ask_into(answers, engine, probe, number))
                await asyncio.sleep(_PAUSE_S)
            while not update.done():
                group.create_task(_ask_into(answers, engine, probe, 0))
                await asyncio.sleep(_PAUSE_S)
    await _update(engine, probe, first + 4, variant=0)
    expect(len(answers) > 0, "no request was answered")
    expect_versions(probe, answers, variants)


@engine_check(needs="weight_updates", reference=True)
async def check_cancelled_update_serves_one_version(engine: Engine, probe: EngineProbe) -> None:
    """A cancelled update changes all weights or none, or makes the engine refuse requests; it never lands later."""
    first = await _version(engine, probe)
    for step, place in enumerate((0, 1, None), start=1):
        cancelled, newer = first + 2 * step - 1, first + 2 * step
        weights = _Held(_weights(probe, 2 * step - 1), place)
        async with asyncio.TaskGroup() as group:
            update = group.create_task(engine.update_weights(weights, cancelled))
            await probe.within(weights.wait_until_read(), "an update that reads its weights")
            update.cancel()
            # If the engine does not wait for the source, the next update ends first.
            group.create_task(weights.continue_later())
            await asyncio.wait((update,), timeout=_LATE_S / 2)
            if update.done():
                await _expect_one_of(engine, probe, {newer - 2: 2 * step - 2, cancelled: 2 * step - 1})
            await _update(engine, probe, newer, variant=2 * step)
            await _expect_one_of(engine, probe, {newer: 2 * step}, refusal=False)
            await asyncio.wait((update,))
        await asyncio.sleep(_LATE_S / 2)
        await _expect_one_of(engine, probe, {newer: 2 * step}, refusal=False)
    await _update(engine, probe, first + 7, variant=0)


@engine_check(sleep_level=1, needs="weight_updates", reference=True)
async def check_cancelled_sleep_keeps_the_weights(engine: Engine, probe: EngineProbe) -> None:
    """After a cancelled sleep or wake-up the engine answers correctly, or is asleep and wakes up."""
    first = await _version(engine, probe)
    for passes in (0, 1, 3, 8):
        for change in (engine.sleep(1), engine.wake_up()):
            await _cancel_after(change, passes)
            await _expect_one_of(engine, probe, {first: 0})
        await engine.wake_up()
        await _expect_one_of(engine, probe, {first: 0}, refusal=False)


@engine_check(sleep_level=2, needs="weight_updates", reference=True)
async def check_cancelled_level_2_never_serves_lost_weights(engine: Engine, probe: EngineProbe) -> None:
    """After a cancelled sleep at level 2 it answers correctly or refuses, until an update brings the weights."""
    first = await _version(engine, probe)
    for step, passes in enumerate((0, 2, 8), start=1):
        await _cancel_after(engine.sleep(2), passes)
        await _expect_one_of(engine, probe, {first + step - 1: step - 1})
        await _cancel_after(engine.wake_up(), passes)
        await _expect_one_of(engine, probe, {first + step - 1: step - 1})
        await engine.wake_up()
        await _expect_one_of(engine, probe, {first + step - 1: step - 1})
        await _update(engine, probe, first + step, variant=step)
        await _expect_one_of(engine, probe, {first + step: step}, refusal=False)
    await _update(engine, probe, first + 4, variant=0)


@define(eq=False)
class _Held:
    """Weights whose reader waits before the weight at `place`, or at the end if there is no such weight."""

    weights: Iterable[tuple[str, Any]]
    place: int | None
    read: threading.Event = field(factory=threading.Event, init=False)
    may_continue: threading.Event = field(factory=threading.Event, init=False)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for number, each in enumerate(self.weights):
            if number == self.place:
                self._hold()
            yield each
        if not self.read.is_set():
            self._hold()

    def _hold(self) -> None:
        self.read.set()
        self.may_continue.wait(_WATCHDOG_S)

    async def wait_until_read(self) -> None:
        while not self.read.is_set():  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.001)

    async def continue_later(self) -> None:
        await asyncio.sleep(_LATE_S)
        self.may_continue.set()


def _weights(probe: EngineProbe, variant: int) -> Iterable[tuple[str, Any]]:
    assert probe.reference is not None
    return probe.reference.weights(variant=variant)


async def _update(engine: Engine, probe: EngineProbe, version: int, *, variant: int) -> None:
    await probe.within(engine.update_weights(_weights(probe, variant), version), "a weight update")


async def _version(engine: Engine, probe: EngineProbe) -> int:
    return int(np.atleast_1d((await probe.ask(engine, probe.request())).weight_version)[-1])


def _sampling(engine: Engine, num_tokens: int) -> SamplingParams:
    # At temperature 1 almost every token differs between versions.
    return SamplingParams(temperature=1.0 if engine.capabilities.logprobs else 0.0, max_tokens=num_tokens)


async def _ask_into(
    answers: list[tuple[GenerateRequest, GenerateResult]], engine: Engine, probe: EngineProbe, number: int
) -> None:
    """Ask, and keep the answer; abort some, and cancel some."""
    request = probe.request(number, _sampling(engine, 16))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(probe.ask(engine, request))
        if number in (2, 4):
            await asyncio.sleep(_PAUSE_S)
            if number == 2 and engine.capabilities.abort:
                await engine.abort(request.request_id)
            if number == 4:
                task.cancel()
    if not task.cancelled():
        answers.append((request, task.result()))


async def _expect_one_of(engine: Engine, probe: EngineProbe, variants: dict[int, int], *, refusal: bool = True) -> None:
    """Expect tokens of one of these versions, or a refusal if that is allowed."""
    request = probe.request(0, _sampling(engine, 8))
    try:
        result = await probe.ask(engine, request)
    except AsleepError:
        expect(refusal, "the engine is asleep after it was woken up")
    except EngineError as error:
        expect(refusal, f"a request was refused: {error}")
    else:
        expect_versions(probe, [(request, result)], variants)


async def _cancel_after(change: Any, passes: int) -> None:
    """Cancel a call after some passes of the event loop, and wait for its end."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(change)
        for _ in range(passes):
            await asyncio.sleep(0.001)
        task.cancel()
