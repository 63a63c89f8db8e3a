"""Pictures: the engine's log-probabilities are those of one forward pass of the model over the whole context."""

import asyncio
import re
from typing import get_args

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import ConfigError
from turnwise.protocols import Resources
from turnwise.types import FinishReason, GenerateRequest, Picture, PlacedPicture, SamplingParams
from turnwise_engine_support.picture_families import FAMILIES, supported_families
from turnwise_testing.engines.scenarios import failure_of, run_scenario
from turnwise_testing.inputs.vision import draw_picture
from turnwise_testing.references.vision_reference import VisionReference
from turnwise_tiny_models import VisionKind, save_random_tiles
from turnwise_transformers_engine import TransformersConfig, TransformersEngine

SIZES = ((8, 8), (24, 24), (16, 40), (40, 8))
"""Pixels of pictures, whose placeholders are of 8 by 8."""


@pytest.fixture(scope="session", params=[each.model_type for each in FAMILIES])
def reference(request, tmp_path_factory):
    """The forward pass of a tiny vision-language model of each family."""
    if request.param in get_args(VisionKind):
        return request.getfixturevalue(request.param)
    return VisionReference(save_random_tiles(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture
def serve_pictures(reference):
    """A function that runs `scenario(engine)` on a started engine of the model."""

    def run(scenario, **options):
        config = TransformersConfig(**{"model": reference.path, "device": "cpu", "max_context": 512, **options})
        return run_scenario(TransformersEngine(config, Resources()), scenario, timeout_s=120)

    return run


def write(reference, parts):
    """Return the ids and places of texts, which are lists of ids, and pictures."""
    ids, places = [], []
    for part in parts:
        if isinstance(part, Picture):
            own = reference.write(part)
            places.append(PlacedPicture(start=len(ids), num_tokens=len(own), picture=part))
            ids += own
        else:
            ids += part
    return ids, tuple(places)


def ask(ids, places=(), number=0, **sampling):
    params = SamplingParams(**{"max_tokens": 6, "temperature": 1.0, "seed": number, **sampling})
    return GenerateRequest(
        request_id=f"r{number}", trajectory_id="t", token_ids=np.array(ids), sampling=params, pictures=places
    )


TEXTS = st.lists(st.integers(20, 200), min_size=1, max_size=30)
PICTURES = st.builds(lambda seed, size: draw_picture(seed, *size), st.integers(0, 3), st.sampled_from(SIZES))
TURNS = st.lists(st.lists(st.tuples(TEXTS, PICTURES), max_size=2), min_size=1, max_size=3)


@given(conversations=st.lists(TURNS, min_size=1, max_size=3), chunk=st.sampled_from([7, 1024]), after=TEXTS)
@settings(max_examples=8, deadline=None)
def test_every_turn_has_the_models_log_probabilities(reference, conversations, chunk, after):
    """Several conversations at once, each with pictures in several turns, prefilled in chunks that cut pictures."""

    async def converse(engine, number, turns):
        ids, places = [], ()
        for turn, parts in enumerate(turns):
            new_ids, new = write(reference, [*(each for pair in parts for each in pair), after])
            places += tuple(evolve(place, start=place.start + len(ids)) for place in new)
            ids += new_ids
            request = ask(ids, places, number * 10 + turn)
            result = await engine.generate(request)
            reference.expect_logprobs(request, result)
            assert turn == 0 or result.num_cached_tokens >= len(ids) - len(new_ids) - 1
            ids += result.token_ids.tolist()

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            for number, turns in enumerate(conversations):
                group.create_task(converse(engine, number, turns))

    config = TransformersConfig(model=reference.path, device="cpu", max_context=512, max_batch_tokens=chunk)
    run_scenario(TransformersEngine(config, Resources()), scenario, timeout_s=120)


def test_the_same_ids_with_another_picture_share_no_cache(serve_pictures, reference):
    """Keys and values behind a picture belong to its bytes; those before it are shared."""
    before, after = list(range(40, 60)), list(range(60, 80))
    ids, first = write(reference, [before, draw_picture(0), after])
    _, second = write(reference, [before, draw_picture(1), after])

    async def scenario(engine):
        requests = [ask(ids, places, number) for number, places in enumerate((first, second, first, second))]
        return requests, [await engine.generate(request) for request in requests]

    requests, results = serve_pictures(scenario)
    for request, result in zip(requests, results, strict=True):
        reference.expect_logprobs(request, result)
    assert [result.num_cached_tokens for result in results] == [0, 20, len(ids) - 1, len(ids) - 1]


def test_a_picture_is_processed_once(serve_pictures, reference):
    """Eight requests with one picture compute its arrays once, and a later turn does not again."""
    ids, places = write(reference, [[50], draw_picture(0), [51]])

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(engine.generate(ask(ids, places, number)))
        await engine.generate(ask([*ids, 52], places, 9))
        return engine._pictures.num_computed

    assert serve_pictures(scenario) == 1


def test_a_sampled_placeholder_is_text(serve_pictures, reference):
    """The id of a placeholder outside the places of pictures has no picture."""
    ids, places = write(reference, [[50], draw_picture(0), [51]])
    request = ask([*ids, reference.placeholder, 52], places)

    async def scenario(engine):
        return await engine.generate(request)

    reference.expect_logprobs(request, serve_pictures(scenario))


def test_text_alone_is_served(serve_pictures, reference):
    """A vision-language model answers requests without pictures, beside one with a picture."""
    ids, places = write(reference, [[50], draw_picture(0), [51]])
    requests = [ask(list(range(30, 70)), number=0), ask(ids, places, 1), ask([33], number=2)]

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.generate(request)) for request in requests]
        return [task.result() for task in tasks]

    for request, result in zip(requests, serve_pictures(scenario), strict=True):
        reference.expect_logprobs(request, result)


def test_weights_change_between_two_tokens(serve_pictures, reference):
    """An update in mid-flight: tokens behind it see the picture through the new vision tower too."""
    ids, places = write(reference, [[50], draw_picture(0), [51]])
    request = ask(ids, places, max_tokens=200)

    async def scenario(engine):
        heard = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.generate(evolve(request, on_tokens=lambda _ids: heard.set())))
            await heard.wait()
            await engine.update_weights(reference.weights(variant=1), 1)
        return task.result()

    result = serve_pictures(scenario)
    new = np.broadcast_to(result.weight_version, result.token_ids.shape) == 1
    assert not new.all()
    reference.expect_logprobs(request, result, part=~new)
    if new.any():
        reference.expect_logprobs(request, result, variant=1, part=new)


@pytest.mark.parametrize("level", [1, 2])
def test_a_slept_engine_reads_the_picture_again(serve_pictures, reference, level):
    """After sleep, wake-up and an update, the same request has the log-probabilities of the new weights."""
    ids, places = write(reference, [[50], draw_picture(0), [51]])

    async def scenario(engine):
        await engine.generate(ask(ids, places))
        await engine.sleep(level)
        await engine.wake_up()
        await engine.update_weights(reference.weights(variant=1), 1)
        return await engine.generate(ask(ids, places))

    result = serve_pictures(scenario)
    assert result.num_cached_tokens == 0
    reference.expect_logprobs(ask(ids, places), result, variant=1)


def test_an_aborted_request_keeps_its_tokens(serve_pictures, reference):
    """An abort ends a request with pictures, and a next one is served."""
    ids, places = write(reference, [[50], draw_picture(0), [51]])
    request = ask(ids, places, max_tokens=400)

    async def scenario(engine):
        heard = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.generate(evolve(request, on_tokens=lambda _ids: heard.set())))
            await heard.wait()
            await engine.abort(request.request_id)
        return task.result(), await engine.generate(ask(ids, places, 1))

    aborted, later = serve_pictures(scenario)
    assert aborted.finish_reason is FinishReason.ABORT
    assert len(aborted.token_ids)
    reference.expect_logprobs(request, aborted)
    reference.expect_logprobs(ask(ids, places, 1), later)


def test_wrong_pictures_are_refused(serve_pictures, reference):
    """Each error is one line that names the picture, and the engine lives on."""
    picture = draw_picture(0)
    ids, (place,) = write(reference, [[50], picture, [51]])
    key, size, stop = picture.key[:12], ids.count(reference.placeholder), place.stop
    broken = Picture(data=picture.data[:60], media_type="image/png")
    fewer, at = f"has {size - 1} placeholders, but .* computes {size}", f"the picture {key} at token"
    cases = (
        ([evolve(place, num_tokens=place.num_tokens - 1)], f"{at} 1 {fewer}"),
        ([evolve(place, start=2)], f"{at}s 2 to {stop + 1} is on ids that are not .* placeholder"),
        ([evolve(place, start=3)], f"{at}s 3 to {stop + 2} touches another picture, or ends behind"),
        ([place, evolve(place, start=stop - 1, num_tokens=1)], f"tokens {stop - 1} to {stop} touches another picture"),
        ([evolve(place, picture=broken)], f"picture {broken.key[:12]} .image/png. is broken"),
    )

    async def scenario(engine):
        for places, text in cases:
            failure = await failure_of(engine.generate(ask(ids, tuple(places))))
            assert re.search(text, str(failure)), str(failure)
        return await engine.generate(ask(ids, (place,)))

    reference.expect_logprobs(ask(ids, (place,)), serve_pictures(scenario))


def test_a_text_model_refuses_pictures_by_name(tiny_model, serve):
    """The capability is off, and a request with pictures names the model."""
    place = PlacedPicture(start=1, num_tokens=2, picture=draw_picture(0))

    async def scenario(engine):
        assert not engine.capabilities.pictures
        return str(await failure_of(engine.generate(ask([5, 6, 7, 8], (place,)))))

    text = serve(tiny_model, scenario)
    assert f"the model '{tiny_model}' reads no pictures" in text
    assert text.endswith(supported_families())


def test_a_text_model_with_windows_is_refused(tmp_path):
    """The decoder of pictures has full attention, so a model with another one does not start."""
    path = save_random_tiles("llava_next", tmp_path, options={"sliding_window": 64})
    engine = TransformersEngine(TransformersConfig(model=path, device="cpu"), Resources())
    error = asyncio.run(failure_of(engine.start(), ConfigError))
    assert "vision-language model, whose decoder needs full attention and rotary positions" in str(error)


@pytest.mark.parametrize(
    "options", [{"decoder": "fused"}, {"decoder": "generic"}, {"num_blocks": 9}, {"prefix_caching": False}]
)
def test_options_of_other_decoders_are_refused(reference, options):
    """An option that the model's decoder would ignore is an error that names it."""
    config = TransformersConfig(model=reference.path, device="cpu", **options)
    engine = TransformersEngine(config, Resources())
    name = next(iter(options))
    error = asyncio.run(failure_of(engine.start(), ConfigError))
    assert f"engine.{name}" in str(error)
