"""Checks of engines that accept pictures: they see each one, keep them apart, and refuse what does not fit."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from turnwise.protocols import Engine
from turnwise.types import GenerateRequest, GenerateResult, Picture, SamplingParams
from turnwise_testing.checks.engine.check import engine_check
from turnwise_testing.probes.engine import EngineProbe, expect, expect_refusal
from turnwise_testing.probes.pictures import PictureProbe

_SAMPLING = SamplingParams(temperature=1.0, max_tokens=6)


@engine_check(needs="pictures", pictures=True)
async def check_picture_logprobs_are_those_of_the_model(engine: Engine, probe: EngineProbe) -> None:
    """Of requests at once, with several pictures, one or none, each has the scores of one forward pass."""
    texts = probe.prompts
    contexts: list[list[Sequence[int] | int]] = [
        [texts[1], 0, texts[2]],
        [texts[3], 1, texts[2], 0, texts[1]],
        [texts[4]],
    ]
    for number in range(2, len(_pictures(probe).pictures)):
        contexts.append([texts[2], number, texts[1]])
    requests = [_request(probe, number, parts) for number, parts in enumerate(contexts)]
    for request, result in zip(requests, await probe.ask_together(engine, requests), strict=True):
        _compare(probe, request, result)


@engine_check(needs="pictures", pictures=True)
async def check_same_ids_with_another_picture(engine: Engine, probe: EngineProbe) -> None:
    """A prefix cache knows pictures of equally many placeholders apart."""
    for number, picture in enumerate((0, 1, 0, 1)):
        request = _request(probe, number, [probe.prompts[3], picture, probe.prompts[2]])
        _compare(probe, request, await probe.ask(engine, request))


@engine_check(needs="pictures", pictures=True)
async def check_pictures_in_later_turns(engine: Engine, probe: EngineProbe) -> None:
    """A context that grows by its own tokens, a text and a picture in each turn has the scores of the whole."""
    parts: list[Sequence[int] | int] = [probe.prompts[1], 0, probe.prompts[2]]
    for turn in range(3):
        request = _request(probe, turn, parts)
        result = await probe.ask(engine, request)
        _compare(probe, request, result)
        parts += [result.token_ids.tolist(), probe.prompts[turn], turn % 2, probe.prompts[1]]


@engine_check(needs="pictures", pictures=True)
async def check_pictures_after_an_update(engine: Engine, probe: EngineProbe) -> None:
    """An engine with updates sees a picture of an earlier request through its new weights."""
    parts: list[Sequence[int] | int] = [probe.prompts[1], 0, probe.prompts[2]]
    request = _request(probe, 0, parts)
    _compare(probe, request, await probe.ask(engine, request))
    if not engine.capabilities.weight_updates:
        return
    try:
        await probe.within(engine.update_weights(_pictures(probe).reference.weights(variant=1), 1), "update_weights")
        again = _request(probe, 1, parts)
        _compare(probe, again, await probe.ask(engine, again), variant=1)
    finally:
        await probe.within(engine.update_weights(_pictures(probe).reference.weights(variant=0), 2), "update_weights")


@engine_check(needs="pictures", pictures=True)
async def check_wrong_placeholders_are_refused(engine: Engine, probe: EngineProbe) -> None:
    """Placeholders that differ from the processor's raise `EngineError` with the picture; the engine lives on."""
    request = _request(probe, 0, [probe.prompts[1], 0, probe.prompts[2]])
    (place,) = request.pictures
    fewer = evolve(request, pictures=(evolve(place, num_tokens=max(place.num_tokens - 1, 1)),))
    moved = evolve(request, pictures=(evolve(place, start=place.start + 1),))
    for wrong, subject in ((fewer, "too few placeholders"), (moved, "a picture on other ids")):
        await expect_refusal(engine.generate(wrong), subject, says=place.picture.key[:12])
    _compare(probe, request, await probe.ask(engine, request))


@engine_check(needs="pictures", pictures=True)
async def check_broken_picture_is_refused(engine: Engine, probe: EngineProbe) -> None:
    """Bytes that are no picture raise `EngineError` with the picture's key, and the engine lives on."""
    request = _request(probe, 0, [probe.prompts[1], 0, probe.prompts[2]])
    (place,) = request.pictures
    broken = Picture(data=place.picture.data[: len(place.picture.data) // 2], media_type=place.picture.media_type)
    wrong = evolve(request, pictures=(evolve(place, picture=broken),))
    await expect_refusal(engine.generate(wrong), "half of a picture", says=broken.key[:12])
    _compare(probe, request, await probe.ask(engine, request))


def _pictures(probe: EngineProbe) -> PictureProbe:
    assert probe.pictures is not None
    return probe.pictures


def _request(probe: EngineProbe, number: int, parts: Sequence[Sequence[int] | int]) -> GenerateRequest:
    name = probe.request().request_id
    return _pictures(probe).request(name, parts, _SAMPLING.with_(seed=number))


def _compare(probe: EngineProbe, request: GenerateRequest, result: GenerateResult, variant: int = 0) -> None:
    ids = [*request.token_ids.tolist(), *result.token_ids.tolist()]
    expected, _best = _pictures(probe).reference.scores(
        ids, len(request.token_ids), temperature=1.0, variant=variant, pictures=request.pictures
    )
    error = float(abs(result.logprobs - expected).max())
    probe.measured["picture_logprob_error"] = max(error, probe.measured.get("picture_logprob_error", 0.0))
    expect(
        error <= probe.logprob_bound,
        f"log-probabilities behind {len(request.pictures)} pictures are off by {error:.3g} nats",
    )
