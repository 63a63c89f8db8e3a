"""Ten turns with pictures at random places: ids, pixels and positions are those of the model's own processor."""

import io
import random
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from turnwise.media import picture_part
from turnwise.protocols import ModelSpec
from turnwise.record.trajectory import Trajectory
from turnwise_chat_templates import load_chat
from turnwise_chat_templates.pictures import load_processor
from turnwise_engine_support.picture_families import FAMILIES
from turnwise_engine_support.pictures import PictureReader
from turnwise_testing.inputs.vision import QWEN_3_VL, draw_picture
from turnwise_tiny_models import VisionKind, save_random_tiles, save_random_vision


@pytest.fixture(scope="module", params=[each.model_type for each in FAMILIES])
def folder(request, tmp_path_factory):
    """The directory of a tiny model of each family of which engines and trainer take pictures."""
    if request.param == "smolvlm":
        pytest.importorskip("num2words")
    path = tmp_path_factory.mktemp(request.param)
    if request.param in get_args(VisionKind):
        return save_random_vision(request.param, path, chat_template=QWEN_3_VL)
    return save_random_tiles(request.param, path)


def expect_arrays(family, arrays, expected):
    """Compare the arrays of pictures with those of the whole."""
    if family.model_type == "llava_next":
        # The processor pads the tiles of pictures to the most that one of them has.
        pairs = zip(expected["pixel_values"], arrays, strict=True)
        expected["pixel_values"] = torch.cat([padded[: len(each.pixel_values)] for padded, each in pairs])
    for name, value in family.collate(arrays).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("seed", range(4))
def test_positions_are_those_of_the_whole(folder, seed):
    """Ids, axes and arrays of a record equal the ones that the model and its processor make of the whole."""
    rng, chat, reader = random.Random(seed), load_chat(ModelSpec(path=folder)), PictureReader(folder)
    shown, plain = [], []

    def write(number):
        parts, written = [], []
        for _ in range(rng.randint(1, 3)):
            if rng.random() < 0.6:
                picture = draw_picture(rng.randrange(99), rng.randint(8, 90), rng.randint(8, 90))
                shown.append(picture)
                parts.append(picture_part(picture))
                written.append({"type": "image", "image": Image.open(io.BytesIO(picture.data))})
            parts.append({"type": "text", "text": f"turn {number}"})
            written.append(parts[-1])
        plain.append({"role": "user", "content": written})
        return {"role": "user", "content": parts}

    record = Trajectory(chat.picture_prompt([write(0)]))
    for number in range(1, 11):
        sampled = [*chat.tokenizer.encode(f"answer {number}"), chat.stop_token_ids[0]]
        record.add_action(sampled, np.zeros(len(sampled)))
        plain.append({"role": "assistant", "content": f"answer {number}"})
        record.add_observation(chat.picture_delta([write(number)], sampled[-1], with_tools=False))

    tokenizer = chat.tokenizer._tokenizer
    processor = load_processor(folder, tokenizer)
    text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    images = [part["image"] for each in plain if each["role"] == "user" for part in each["content"] if "image" in part]
    types = {"return_mm_token_type_ids": True} if reader.family.has_axes else {}
    more = {"images": images} if images else {}
    whole = processor(text=[text], return_tensors="pt", **types, **more)
    assert record.input_ids.tolist() == whole["input_ids"][0].tolist()
    assert [each.picture.key for each in record.pictures] == [each.key for each in shown]
    arrays = reader.read(record.input_ids, record.pictures)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    found = reader.family.axes(model, len(record.input_ids), record.pictures, arrays)
    if reader.family.has_axes:
        ids, grids = whole["input_ids"], whole.get("image_grid_thw")
        expected, _delta = model.model.get_rope_index(ids, whole["mm_token_type_ids"], image_grid_thw=grids)
        assert np.array_equal(found, expected[:, 0].numpy())
    else:
        assert found is None
    at_placeholders = reader.feature_rows(record.input_ids, record.pictures) >= 0
    assert np.array_equal(at_placeholders, record.input_ids == reader.placeholder)
    if images:
        expect_arrays(reader.family, arrays, dict(whole))
