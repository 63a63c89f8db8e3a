"""Ten turns with pictures at random places: ids, pixels and positions are those of the model's own processor."""

import io
import random

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
from turnwise_engine_support.pictures import PictureReader, axis_positions
from turnwise_testing.inputs.vision import QWEN_3_VL, draw_picture
from turnwise_tiny_models.random_vision import save_random_vision


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def folder(request, tmp_path_factory):
    """The directory of a tiny model."""
    return save_random_vision(request.param, tmp_path_factory.mktemp(request.param), chat_template=QWEN_3_VL)


@pytest.mark.parametrize("seed", range(4))
def test_positions_are_those_of_the_whole(folder, seed):
    """The three axes and the arrays of a record equal the ones that the model and its processor make of the whole."""
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
    more = {"images": images} if images else {}
    whole = processor(text=[text], return_tensors="pt", return_mm_token_type_ids=True, **more)
    assert record.input_ids.tolist() == whole["input_ids"][0].tolist()
    assert [each.picture.key for each in record.pictures] == [each.key for each in shown]
    arrays = reader.read(record.input_ids, record.pictures)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    found = axis_positions(model, len(record.input_ids), record.pictures, arrays)
    grids = whole.get("image_grid_thw")
    expected, _delta = model.model.get_rope_index(whole["input_ids"], whole["mm_token_type_ids"], image_grid_thw=grids)
    assert np.array_equal(found, expected[:, 0].numpy())
    if images:
        assert torch.equal(torch.cat([each.pixel_values for each in arrays]), whole["pixel_values"])
