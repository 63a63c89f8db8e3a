"""
New weights while requests run, again and again: afterwards every token is replayed on the version that it claims.

`updates_under_load` is for a plugin's own test with many updates; the check in the standard suite is the same with few.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

import numpy as np
from attrs import frozen

from turnwise.protocols import Engine
from turnwise.types import GenerateRequest, GenerateResult, SamplingParams, TokenArray
from turnwise_testing.checks.engine.check import engine_check
from turnwise_testing.checks.engine.token_versions import differences, expect_versions
from turnwise_testing.probes.engine import EngineProbe, Reference, expect, expect_equal

Answer = tuple[GenerateRequest, GenerateResult]

_NUM_CLIENTS = 8
_PAUSE_S = (0.005, 0.05)
"""Shortest and longest time between two updates."""
_NUM_TELLING = 20
"""Tokens that are enough to tell a version from the one before; of few tokens, one in a hundred is."""


@frozen(kw_only=True)
class LoadFigures:
    """
    Result of updates under load.

    Attributes:
        num_updates: versions that were brought.
        num_answers: results in the meantime, aborted requests included.
        num_mixed: answers with tokens of several versions.
        num_versions: versions that sampled a token.
        num_tokens: in all answers; every one of them is checked.
        num_right: tokens that the weights of the version they claim give: their log-probabilities are the reference's,
            or, from an engine without log-probabilities, they are the most likely ones or tie with these.
        num_right_before: the same under the weights of the version before; `num_tokens_before` have one.
        num_tokens_before: tokens of all versions but the first.
        update_s: median seconds of an update.
        longest_update_s: seconds of the longest one.
        first_wrong: text about the first wrong token; empty if all tokens are right.
    """

    num_updates: int
    num_answers: int
    num_mixed: int
    num_versions: int
    num_tokens: int
    num_right: int
    num_right_before: int
    num_tokens_before: int
    update_s: float
    longest_update_s: float
    first_wrong: str = ""

    def __str__(self) -> str:
        return (
            f"{self.num_updates} updates (median {self.update_s:.3f} s, longest {self.longest_update_s:.3f} s),"
            f" {self.num_answers} answers, {self.num_mixed} of several versions, {self.num_versions} versions:"
            f" {self.num_right} of {self.num_tokens} tokens right under the version they claim,"
            f" {self.num_right_before} of {self.num_tokens_before} under the one before"
        )

    def expect_right(self) -> None:
        """Raise `AssertionError` unless every token is right, and the check could have seen that one is not."""
        expect(not self.first_wrong, f"{self.num_tokens - self.num_right} tokens are wrong; {self.first_wrong}")
        expect_equal(self.num_right, self.num_tokens, "tokens that the weights of the version they claim give")
        expect(self.num_tokens_before > 0, "no update reached a request: all tokens are of the first version")
        num_telling = self.num_tokens_before - self.num_right_before
        enough = min(_NUM_TELLING, 0.01 * self.num_tokens_before)
        expect(num_telling > enough, f"versions cannot be told apart: {self}")
        expect(self.num_mixed > 0, "no answer has tokens of two versions: updates wait until nothing runs")


async def updates_under_load(engine: Engine, probe: EngineProbe, *, num_updates: int) -> LoadFigures:
    """
    Update the weights repeatedly while eight clients send requests; then replay all results on the reference.

    Each version has different weights. Some requests are aborted and some cancelled. In the end the engine has the
    reference's first weights again, as it must have at the start.

    Requests sample at temperature 1 where the engine returns log-probabilities: the log-probability of almost every
    token differs between two versions, whereas two versions of a trained model mostly agree on the likeliest token.

    Args:
        engine: started.
        probe: with a reference.
        num_updates: how many.

    Raises:
        AssertionError: a request or an update took too long, an answer's versions fall, or one claims a version that
            was never brought.
    """
    reference = _reference_of(probe)
    clock = asyncio.get_running_loop().time
    started = clock()
    temperature = 1.0 if engine.capabilities.logprobs else 0.0
    sampling = SamplingParams(temperature=temperature, max_tokens=probe.num_long_tokens)
    first = int(np.atleast_1d((await probe.ask(engine, _request(probe, 1, sampling))).weight_version)[-1])
    pause_s = float(np.clip((clock() - started) / 4, *_PAUSE_S))
    answers: list[Answer] = []
    seconds: list[float] = []
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for client in range(_NUM_CLIENTS):
            group.create_task(
                _keep_asking(engine, probe, sampling, range(client, 1_000_000, _NUM_CLIENTS), answers, stop)
            )
        for variant in range(1, num_updates + 1):
            await asyncio.sleep(pause_s)
            weights = reference.weights(variant=variant)
            started = clock()
            await probe.within(engine.update_weights(weights, first + variant), "a weight update")
            seconds.append(clock() - started)
        await asyncio.sleep(pause_s)
        stop.set()
    restored = engine.update_weights(reference.weights(variant=0), first + num_updates + 1)
    await probe.within(restored, "a weight update")
    return _figures(probe, answers, seconds, first)


@engine_check(needs="weight_updates", reference=True)
async def check_updates_under_load(engine: Engine, probe: EngineProbe) -> None:
    """Update after update while requests run: every token comes from the weights of the version it claims."""
    figures = await updates_under_load(engine, probe, num_updates=probe.num_updates)
    probe.measured["tokens_checked"] = figures.num_tokens
    probe.measured["tokens_right"] = figures.num_right
    figures.expect_right()


def _reference_of(probe: EngineProbe) -> Reference:
    if probe.reference is None:
        raise AssertionError("the probe has no reference")
    return probe.reference


def _request(probe: EngineProbe, number: int, sampling: SamplingParams) -> GenerateRequest:
    """Return a long request; contexts come again, so that an engine finds them in its cache."""
    return probe.request(number, sampling) if number % 3 else probe.prefix_request(sampling)


async def _keep_asking(
    engine: Engine,
    probe: EngineProbe,
    sampling: SamplingParams,
    numbers: Sequence[int],
    answers: list[Answer],
    stop: asyncio.Event,
) -> None:
    """Send one request after the other until told to stop; abort some, cancel some."""
    for number in numbers:
        if stop.is_set():
            return
        request = _request(probe, number, sampling)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(probe.ask(engine, request))
            await asyncio.sleep(_PAUSE_S[0])
            if number % 11 == 5 and engine.capabilities.abort:
                await engine.abort(request.request_id)
            if number % 13 == 6:
                task.cancel()
        if not task.cancelled():
            answers.append((request, task.result()))


def _figures(probe: EngineProbe, answers: Sequence[Answer], seconds: Sequence[float], first: int) -> LoadFigures:
    claimed = [np.broadcast_to(result.weight_version, result.token_ids.shape) for _, result in answers]
    versions = sorted({int(version) for each in claimed for version in each})
    last = first + len(seconds)
    for each in claimed:
        expect((np.diff(each) >= 0).all(), f"weight versions fall from token to token: {each.tolist()}")
    expect(
        not versions or first <= versions[0] <= versions[-1] <= last,
        f"tokens claim weight versions {versions[:1]} to {versions[-1:]}; those brought are {first} to {last}",
    )
    right = before = 0
    for version in versions:
        # The one before goes first: a reference keeps the last two.
        before += _num_right(probe, answers, claimed, version, version - 1 - first) if version > first else 0
        right += _num_right(probe, answers, claimed, version, version - first)
    return LoadFigures(
        num_updates=len(seconds),
        num_answers=len(answers),
        num_mixed=sum(len(np.unique(each)) > 1 for each in claimed),
        num_versions=len(versions),
        num_tokens=sum(map(len, claimed)),
        num_right=right,
        num_right_before=before,
        num_tokens_before=sum(int((each > first).sum()) for each in claimed),
        update_s=statistics.median(seconds),
        longest_update_s=max(seconds),
        first_wrong=_first_wrong(probe, answers, claimed, first) if right < sum(map(len, claimed)) else "",
    )


def _first_wrong(probe: EngineProbe, answers: Sequence[Answer], claimed: Sequence[TokenArray], first: int) -> str:
    last = max(int(each.max()) for each in claimed if len(each))
    variants = {version: version - first for version in range(first, last + 1)}
    for answer in answers:
        try:
            expect_versions(probe, [answer], variants)
        except AssertionError as error:
            return str(error)
    return ""


def _num_right(
    probe: EngineProbe, answers: Sequence[Answer], claimed: Sequence[TokenArray], version: int, variant: int
) -> int:
    """Return how many tokens that claim a version come from a variant's weights."""
    count = 0
    for (request, result), versions in zip(answers, claimed, strict=True):
        chosen = versions == version
        if chosen.any():
            count += int((differences(probe, request, result, variant) <= 1.0)[chosen].sum())
    return count
