"""Requests with pictures around a fake vLLM: its input, and the refusals before it."""

import asyncio
import json
import re
import threading

import numpy as np
import pytest
from attrs import evolve

from turnwise.errors import ConfigError
from turnwise.types import FinishReason, GenerateRequest, Picture, PlacedPicture, SamplingParams
from turnwise_engine_support.picture_families import FAMILIES
from turnwise_engine_support.pictures import PictureReader
from turnwise_testing.engines.scenarios import failure_of
from turnwise_testing.inputs.vision import draw_picture, save_qwen
from turnwise_vllm_engine import VllmConfig
from turnwise_vllm_engine.pictures import check_pictures, picture_arguments, reads_pictures

PAD = 9


@pytest.mark.parametrize("model_type", [each.model_type for each in FAMILIES])
def test_families_that_vllm_is_not_given_are_off(model_type, tmp_path):
    """The capability is for exactly the families whose arrays were compared with a forward pass."""
    config = {"model_type": model_type, "vision_config": {"model_type": "clip_vision_model"}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    served = model_type in ("qwen2_5_vl", "qwen3_vl", "internvl")
    assert reads_pictures(VllmConfig(model=tmp_path), tmp_path) == served


@pytest.fixture(scope="session")
def seeing(tmp_path_factory):
    """A folder that looks like a Qwen2.5-VL, with a real image processor; 8 by 8 pixels are a token."""
    folder = save_qwen(tmp_path_factory.mktemp("seeing"))
    config = {"model_type": "qwen2_5_vl", "image_token_id": PAD, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def ask(*parts, number=0, **sampling):
    """Return a request of ids and pictures, which have 9 tokens."""
    ids, places = [], []
    for part in parts:
        if isinstance(part, Picture):
            places.append(PlacedPicture(start=len(ids), num_tokens=9, picture=part))
            ids += [PAD] * 9
        else:
            ids += part
    params = SamplingParams(**{"max_tokens": 4, "seed": number, **sampling})
    return GenerateRequest(
        request_id=f"r{number}",
        trajectory_id="t",
        token_ids=np.array(ids),
        sampling=params,
        pictures=tuple(places),
    )


def test_vllm_gets_the_arrays_at_the_places_of_the_request(serve, seeing, llm):
    """The ids as they are, also a placeholder that the model has sampled, which is text; the key names a picture."""
    first, second = draw_picture(0), draw_picture(1)
    request = ask([5, PAD, 6], first, [7], second, [8, PAD])

    async def scenario(engine):
        assert engine.capabilities.pictures
        await engine.generate(request)

    serve(scenario, model=seeing)
    (prompt,) = llm.prompts
    assert prompt["prompt_token_ids"] == request.token_ids.tolist()
    assert prompt["places"] == [(3, 9, first.key), (13, 9, second.key)]
    assert [grid.tolist() for grid in prompt["grids"]] == [[1, 6, 6]] * 2


def test_a_text_is_sent_as_before(serve, seeing, llm):
    """A vision-language model takes requests without pictures."""

    async def scenario(engine):
        await engine.generate(ask([5, 6, 7]))

    serve(scenario, model=seeing)
    assert llm.prompts == [{"type": "token", "prompt_token_ids": [5, 6, 7]}]


def test_a_picture_is_read_once(serve, seeing, monkeypatch):
    """Requests at once, and later turns, share its arrays."""
    readers = []
    real = PictureReader.read
    monkeypatch.setattr(PictureReader, "read", lambda self, *args: readers.append(self) or real(self, *args))

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(engine.generate(ask([5], draw_picture(0), [6], number=number)))
        await engine.generate(ask([5], draw_picture(0), [6, 7], number=9))

    serve(scenario, model=seeing)
    assert len(readers) == 5
    assert readers[0].num_computed == 1


def test_what_does_not_fit_never_reaches_vllm(serve, seeing, llm):
    """A wrong number of features would end its process. Each error names the picture, and the engine lives on."""
    picture = draw_picture(0)
    request = ask([5], picture, [6])
    (place,) = request.pictures
    broken = Picture(data=picture.data[:60], media_type="image/png")
    cases = (
        (evolve(place, num_tokens=8), f"request 'r0': the picture {picture.key[:12]} at token 1 has 8 placeholders"),
        (evolve(place, start=2), "is on ids that are not the model's placeholder, 9"),
        (evolve(place, start=3), "or ends behind the 11 tokens"),
        (evolve(place, picture=broken), f"picture {broken.key[:12]} .image/png. is broken"),
    )

    async def scenario(engine):
        for wrong, text in cases:
            assert re.search(text, str(await failure_of(engine.generate(evolve(request, pictures=(wrong,))))))
        assert not llm.prompts
        return await engine.generate(request), engine.stats()["num_running"]

    result, num_running = serve(scenario, model=seeing)
    assert len(result.token_ids) == 4
    assert num_running == 0


@pytest.mark.parametrize("end", ["abort", "sleep"])
def test_a_request_ends_while_its_pictures_are_read(serve, seeing, llm, monkeypatch, end):
    """It never reaches vLLM: aborted it has no ids, and an engine that sleeps meanwhile refuses it."""
    reading, go_on = threading.Event(), threading.Event()
    read = PictureReader.read

    def wait(self, *args):
        reading.set()
        go_on.wait()
        return read(self, *args)

    monkeypatch.setattr(PictureReader, "read", wait)

    async def scenario(engine):
        task = asyncio.ensure_future(engine.generate(ask([5], draw_picture(0), [6])))
        await asyncio.to_thread(reading.wait)
        await (engine.abort("r0") if end == "abort" else engine.sleep(1))
        go_on.set()
        return await (task if end == "abort" else failure_of(task))

    found = serve(scenario, model=seeing)
    if end == "abort":
        assert (0, FinishReason.ABORT) == (len(found.token_ids), found.finish_reason)
    else:
        assert "asleep" in str(found)
    assert not llm.prompts


def test_a_text_model_refuses_pictures_by_name(serve):
    """As do arguments of vLLM that leave its vision tower out."""

    async def scenario(engine):
        assert not engine.capabilities.pictures
        return str(await failure_of(engine.generate(ask([5], draw_picture(0)))))

    assert "request 'r0' has 1 pictures, which this engine does not read" in serve(scenario)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, True),
        ({"limit_mm_per_prompt": {"image": 4}}, True),
        ({"limit_mm_per_prompt": {"image": 0}}, False),
        ({"language_model_only": True}, False),
    ],
)
def test_arguments_that_leave_pictures_out(seeing, arguments, expected):
    """The capability is what vLLM can do."""
    assert reads_pictures(VllmConfig(engine_args=arguments), seeing) is expected
    assert not reads_pictures(VllmConfig(engine_args=arguments), None)


def test_the_arguments_of_a_vision_language_model(seeing, tmp_path):
    """Arrays come normalised and are not kept twice; a model of text has none of these arguments."""
    found = picture_arguments(seeing)
    assert found["mm_device_do_normalize"] is False
    assert (found["mm_processor_cache_gb"], found["limit_mm_per_prompt"]) == (0, {"video": 0})
    assert picture_arguments(tmp_path) == {}
    with pytest.raises(ValueError, match="'engine_args' must not contain 'mm_device_do_normalize'"):
        VllmConfig(engine_args={"mm_device_do_normalize": True})


def test_what_vllm_needs_for_pictures(seeing, tmp_path, monkeypatch):
    """Without torchvision vLLM's own error has many lines and another subject."""
    monkeypatch.setattr("turnwise_vllm_engine.pictures.find_spec", lambda name: name != "torchvision" or None)
    with pytest.raises(ConfigError, match="is a vision-language model, for which vLLM needs torchvision"):
        check_pictures(VllmConfig(), seeing)
    check_pictures(VllmConfig(engine_args={"mm_processor_kwargs": {"max_pixels": 9}}), tmp_path)

    monkeypatch.setattr("turnwise_vllm_engine.pictures.find_spec", lambda _name: True)
    check_pictures(VllmConfig(), seeing)
    with pytest.raises(ConfigError, match="mm_processor_kwargs: pictures are read as"):
        check_pictures(VllmConfig(engine_args={"mm_processor_kwargs": {"max_pixels": 9}}), seeing)


@pytest.mark.parametrize(
    ("rope", "is_right"),
    [
        ({"rope_parameters": {"mrope_interleaved": True}}, True),
        ({"rope_scaling": {"mrope_interleaved": True}}, True),
        ({"rope_parameters": {"mrope_interleaved": False}}, False),
        ({}, False),
    ],
)
def test_positions_that_vllm_would_read_otherwise(tmp_path, monkeypatch, rope, is_right):
    """transformers takes the axes of Qwen3-VL in turns, whatever its config says; vLLM asks the config."""
    monkeypatch.setattr("turnwise_vllm_engine.pictures.find_spec", lambda _name: True)
    config = {"model_type": "qwen3_vl", "text_config": rope}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if is_right:
        check_pictures(VllmConfig(), tmp_path)
    else:
        with pytest.raises(ConfigError, match="lack mrope_interleaved"):
            check_pictures(VllmConfig(), tmp_path)
