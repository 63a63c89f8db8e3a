"""Tests of the vision-language models: the folder loads, and a picture changes what the model says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from turnwise_tiny_models import (
    IMAGE_PAD,
    VISION_CHATML,
    VISION_END,
    VISION_START,
    VISION_TOKENS,
    VisionSizes,
    byte_level_tokenizer,
    image_processor,
    save_vision,
    tiny_qwen2_5_vl,
    tiny_qwen3_vl,
)

TOKENIZER = byte_level_tokenizer(["a red circle"] * 3, 300, special_tokens=VISION_TOKENS, chat_template=VISION_CHATML)


def picture(seed: int, height: int = 30, width: int = 45) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("make", [tiny_qwen2_5_vl, tiny_qwen3_vl])
def test_a_saved_folder_is_a_whole_model(make, tmp_path):
    """Model, tokenizer and image processor load from the folder, and each pixel counts."""
    torch.manual_seed(0)
    save_vision(make(TOKENIZER), TOKENIZER, tmp_path)
    model, info = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    tokenizer, processor = AutoTokenizer.from_pretrained(tmp_path), AutoImageProcessor.from_pretrained(tmp_path)
    pad = tokenizer.convert_tokens_to_ids(IMAGE_PAD)
    answers = []
    for seed in (0, 1):
        inputs = processor(images=[picture(seed)], return_tensors="pt")
        num_tokens = int(inputs["image_grid_thw"].prod()) // 4
        ids = torch.tensor([tokenizer.encode(f"see{VISION_START}") + [pad] * num_tokens + tokenizer.encode(VISION_END)])
        with torch.no_grad():
            logits = model(input_ids=ids, mm_token_type_ids=(ids == pad).int(), **inputs).logits[0, -1]
        answers.append(logits)
    assert num_tokens == 24  # 32 by 48 pixels, of which a placeholder has 8 by 8
    assert (answers[0] - answers[1]).abs().max() > 1e-4


def test_the_chat_template_has_one_placeholder_for_a_picture():
    """Contents may be a text, or a list of texts and pictures."""
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": content}]
    text = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nLook.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is it?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("make", [tiny_qwen2_5_vl, tiny_qwen3_vl])
def test_layers_and_spread_of_the_matrices(make):
    """Both are options, of the vision tower and of the text model."""
    torch.manual_seed(0)
    model = make(TOKENIZER, VisionSizes(num_vision_layers=1, initializer_range=0.1))
    assert len(model.model.visual.blocks) == 1
    text, vision = model.model.language_model.layers[0].self_attn.q_proj, model.model.visual.blocks[0].attn.qkv
    assert [0.1, 0.1] == [pytest.approx(float(each.weight.detach().std()), rel=0.1) for each in (text, vision)]


def test_a_folder_with_another_processor(tmp_path):
    """The processor of the call is written; by `BOX` a picture shrinks to the means of its squares."""
    processor = image_processor(max_pixels=32 * 32, resampling=Image.Resampling.BOX)
    save_vision(tiny_qwen2_5_vl(TOKENIZER), TOKENIZER, tmp_path, processor)
    loaded = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    image = Image.new("RGB", (128, 128), "white")
    checks = image.copy()
    checks.paste("black", (0, 0, 64, 128))
    lines = image.copy()
    for column in range(0, 128, 2):
        lines.paste("black", (column, 0, column + 1, 128))
    seen = [loaded(images=[each], return_tensors="np")["pixel_values"] for each in (checks, lines)]
    assert {(64, 96)} == {each.shape for each in seen}
    grey = loaded(images=[Image.new("RGB", (32, 32), (128, 128, 128))], return_tensors="np")["pixel_values"]
    np.testing.assert_array_equal(seen[1], grey)
    assert not np.array_equal(seen[0], grey)
