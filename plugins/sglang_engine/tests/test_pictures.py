"""Requests with pictures around a fake SGLang: its input, and the refusals before it."""

import asyncio
import json
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import ConfigError
from turnwise.protocols import ModelSpec
from turnwise.sized_cache import SizedCache
from turnwise.types import GenerateRequest, Picture, PlacedPicture, SamplingParams
from turnwise_engine_support.pictures import PictureReader
from turnwise_sglang_engine import SglangConfig
from turnwise_sglang_engine.arguments import server_arguments
from turnwise_sglang_engine.frames import Frame
from turnwise_sglang_engine.pictures import ReceivedPictures, SentPictures, check_pictures, reads_pictures
from turnwise_sglang_engine.requests import GREEDY
from turnwise_sglang_engine.served_pictures import ServedPictures, picture_positions
from turnwise_sglang_engine.service import Service
from turnwise_testing.engines.scenarios import VOCAB_SIZE, failure_of
from turnwise_testing.inputs.vision import draw_picture, save_qwen

PAD = 9
FIND_SPEC = "turnwise_sglang_engine.pictures.find_spec"


@pytest.fixture(scope="session")
def seeing(tmp_path_factory):
    """A folder that looks like a Qwen2.5-VL, with a real image processor; 8 by 8 pixels are a token."""
    folder = save_qwen(tmp_path_factory.mktemp("seeing"))
    config = {
        "model_type": "qwen2_5_vl",
        "image_token_id": PAD,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 4096,
        "vision_config": {},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture
def torchvision(monkeypatch):
    """Lets torchvision look installed: the fake SGLang does not need it."""
    monkeypatch.setattr(FIND_SPEC, lambda _name: True)


def ask(*parts, number=0):
    """Return a greedy request of ids and pictures, which have 9 tokens."""
    ids, places = [], []
    for part in parts:
        if isinstance(part, Picture):
            places.append(PlacedPicture(start=len(ids), num_tokens=9, picture=part))
            ids += [PAD] * 9
        else:
            ids += part
    return GenerateRequest(
        request_id=f"r{number}",
        trajectory_id="t",
        token_ids=np.array(ids),
        sampling=SamplingParams(max_tokens=4, temperature=0.0),
        pictures=tuple(places),
    )


class Manager:
    """Keeps requests, and answers each with one id that ends it."""

    def __init__(self):
        self.requests, self.rid_to_state = [], {}

    async def generate_request(self, request, _):
        self.requests.append(request)
        yield {"output_ids": [3], "meta_info": {"finish_reason": {"type": "length"}}}


def serve_frames(seeing, requests, meanwhile=None):
    """Send requests to a service of the model, and return what SGLang was given, and the heads of the replies."""
    sent, replies = SentPictures(True), []

    async def scenario():
        manager = Manager()
        async with asyncio.TaskGroup() as group:
            structs = SimpleNamespace(GenerateReqInput=SimpleNamespace)
            service = Service(manager, structs, repr, 1, group, pictures=ServedPictures(seeing))
            service.send = lambda head, *_arrays: replies.append(head)
            for number, request in enumerate(requests):
                described, arrays = sent.pack(request.pictures)
                options = {"max_new_tokens": 1, "stop_token_ids": []}
                head = {"op": "generate", "id": number, "method": GREEDY, "options": options, "stream": False}
                service.receive(Frame({**head, "pictures": described}, [request.token_ids, *arrays]))
            if meanwhile is not None:
                await meanwhile(service)
        return manager.requests

    return asyncio.run(scenario()), replies


@pytest.fixture
def processor_package(monkeypatch):
    """Restores the environment variables that a process of SGLang gets for pictures."""
    for name in ("SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE", "SGLANG_VLM_CACHE_SIZE_MB"):
        monkeypatch.setenv(name, "unset")


@pytest.mark.usefixtures("processor_package")
def test_sglang_gets_the_arrays_at_the_places_of_the_request(seeing):
    """The ids as they are, also a placeholder that the model has sampled, which is text; a text has no pictures."""
    first, second = draw_picture(0), draw_picture(1)
    request = ask([5, PAD, 6], first, [7], second, [8, PAD])

    (seen, text), replies = serve_frames(seeing, [request, ask([5, PAD])])

    if seen.image_data is None:
        seen, text = text, seen
    assert seen.input_ids == request.token_ids.tolist()
    assert [(each.place.start, each.place.picture.key) for each in seen.image_data] == [
        (3, first.key),
        (13, second.key),
    ]
    assert [each.arrays.grid.tolist() for each in seen.image_data] == [[1, 6, 6]] * 2
    assert (text.input_ids, text.image_data) == ([5, PAD], None)
    assert [each["reason"] for each in replies] == ["length"] * 2


@pytest.mark.usefixtures("processor_package")
def test_a_picture_is_read_once(seeing, monkeypatch):
    """Requests at once share its arrays."""
    readers = []
    real = PictureReader.read
    monkeypatch.setattr(PictureReader, "read", lambda self, *args: readers.append(self) or real(self, *args))

    given, _replies = serve_frames(seeing, [ask([5], draw_picture(0), [6, number]) for number in range(4)])

    assert len(given) == len(readers) == 4
    assert readers[0].num_computed == 1


@pytest.mark.usefixtures("processor_package")
def test_a_request_ends_while_its_pictures_are_read(seeing, monkeypatch):
    """It never reaches SGLang."""
    reading, go_on = threading.Event(), threading.Event()
    read = PictureReader.read

    def wait(self, *args):
        reading.set()
        go_on.wait()
        return read(self, *args)

    async def abort(service):
        await asyncio.to_thread(reading.wait)
        service.receive(Frame({"op": "abort", "id": 0}))
        go_on.set()

    monkeypatch.setattr(PictureReader, "read", wait)
    given, (reply,) = serve_frames(seeing, [ask([5], draw_picture(0), [6])], abort)
    assert not given
    assert reply["reason"] == "abort"


@pytest.mark.usefixtures("torchvision", "starts_a_process")
def test_what_does_not_fit_never_reaches_sglang(serve, seeing):
    """A wrong number of features would end its process. Each error names the picture, and the engine lives on."""
    picture = draw_picture(0)
    request = ask([5], picture, [6])
    (place,) = request.pictures
    broken = Picture(data=picture.data[:60], media_type="image/png")
    cases = (
        (evolve(place, num_tokens=8), f"request 'r0' failed: the picture {picture.key[:12]} at token 1 has 8 placeh"),
        (evolve(place, start=2), "is on ids that are not the model's placeholder, 9"),
        (evolve(place, start=3), "or ends behind the 11 tokens"),
        (evolve(place, picture=broken), f"picture {broken.key[:12]} .image/png. is broken"),
    )

    async def scenario(engine):
        assert engine.capabilities.pictures
        for wrong, text in cases:
            assert re.search(text, str(await failure_of(engine.generate(evolve(request, pictures=(wrong,))))))
        return await engine.generate(request), engine.stats()["num_running"]

    result, num_running = serve(scenario, model=seeing)
    assert len(result.token_ids) == 4
    assert num_running == 0


@pytest.mark.usefixtures("starts_a_process")
def test_a_text_model_refuses_pictures_by_name(serve):
    """As do arguments of SGLang that leave its vision tower out."""

    async def scenario(engine):
        assert not engine.capabilities.pictures
        return str(await failure_of(engine.generate(ask([5], draw_picture(0)))))

    assert "request 'r0' has 1 pictures, which this engine does not read" in serve(scenario)


NUMBERS = st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=12)


@given(requests=NUMBERS, size=st.integers(0, 45))
def test_both_ends_keep_the_same_pictures(requests, size):
    """Whatever requests come: a picture that the engine leaves out is one that the process has."""
    pictures = [Picture(data=bytes([number]) * (5 + number), media_type="image/png") for number in range(6)]
    sent, received = SentPictures(True, SizedCache(size)), ReceivedPictures(SizedCache(size))
    seen = set()
    for numbers in requests:
        places = [PlacedPicture(start=9 * at, num_tokens=3, picture=pictures[each]) for at, each in enumerate(numbers)]
        described, arrays = sent.pack(places)
        found = received.take(described, arrays)
        assert [(each.start, each.num_tokens, each.picture.data) for each in found] == [
            (each.start, each.num_tokens, each.picture.data) for each in places
        ]
        if sum(len(pictures[each].data) for each in set(numbers) | seen) <= size:  # none had to go
            assert len(arrays) == len(set(numbers) - seen)
        seen |= set(numbers)


@st.composite
def contexts(draw):
    """Return a number of tokens, the places of pictures that do not touch, and their grids."""
    places, grids, end = [], [], 0
    for _ in range(draw(st.integers(0, 3))):
        height, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        start = end + draw(st.integers(bool(places), 3))
        places.append(PlacedPicture(start=start, num_tokens=height * width, picture=draw_picture(0)))
        grids.append((1, height, width))
        end = places[-1].stop
    return max(end + draw(st.integers(0, 3)), 1), places, grids


@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VL"])
@given(context=contexts())
def test_positions_are_those_of_transformers(kind, context):
    """Also the one of the next token, which is 1 more than the largest."""
    import torch
    import transformers

    model_class = getattr(transformers, f"{kind}Model")
    model = SimpleNamespace(config=getattr(transformers, f"{kind}Config")())
    for name in ("get_rope_index", "get_vision_position_ids"):
        setattr(model, name, getattr(model_class, name).__get__(model))
    num_tokens, places, grids = context
    types = torch.zeros(1, num_tokens, dtype=torch.int64)
    for place in places:
        types[0, place.start : place.stop] = 1
    patches = torch.tensor([(time, 2 * height, 2 * width) for time, height, width in grids])
    expected, _delta = model.get_rope_index(torch.zeros_like(types), types, image_grid_thw=patches if grids else None)

    found = picture_positions(num_tokens, places, grids)

    np.testing.assert_array_equal(found[:, :-1], expected[:, 0])
    assert found[:, -1].tolist() == [int(expected.max()) + 1] * 3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, True),
        ({"limit_mm_data_per_request": {"image": 4}}, True),
        ({"limit_mm_data_per_request": {"image": 0}}, False),
        ({"language_model_only": True}, False),
        ({"enable_multimodal": False}, False),
    ],
)
def test_arguments_that_leave_pictures_out(seeing, arguments, expected):
    """The capability is what SGLang can do."""
    assert reads_pictures(arguments, seeing) is expected
    assert not reads_pictures(arguments, None)


def test_what_sglang_needs_for_pictures(seeing, tmp_path, monkeypatch):
    """Without torchvision SGLang's own error has many lines and another subject."""
    monkeypatch.setattr(FIND_SPEC, lambda name: name != "torchvision" or None)
    with pytest.raises(ConfigError, match="is a vision-language model, for which SGLang needs torchvision"):
        server_arguments(SglangConfig(device="cpu"), ModelSpec(path=seeing))
    check_pictures({"mm_process_config": {"image": {"max_pixels": 9}}}, tmp_path)


@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, ""),
        ({"model_impl": "sglang"}, ""),
        ({"mm_process_config": {"image": {"max_pixels": 9}}}, "engine_args.mm_process_config: pictures are read as"),
        ({"model_impl": "transformers"}, "engine_args.model_impl: pictures need SGLang's own implementation"),
        ({"rl_on_policy_target": "fsdp"}, "engine_args.rl_on_policy_target: with it, SGLang gives"),
    ],
)
def test_arguments_that_would_change_pictures(seeing, arguments, error):
    """They are refused: the trainer would not see them, or SGLang would not see the pictures."""
    if error:
        with pytest.raises(ConfigError, match=error):
            check_pictures(arguments, seeing)
    else:
        check_pictures(arguments, seeing)


@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 4}}, "a patch of .* has 96 numbers"),
        ({"model_type": "qwen3_vl", "vision_config": {"patch_size": 16}}, "lack mrope_interleaved"),
    ],
)
def test_models_that_sglang_would_misread(tmp_path, config, error):
    """It takes patches of another size for features, and positions of Qwen3-VL for those of Qwen2.5-VL."""
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError, match=error):
        check_pictures({}, tmp_path)
