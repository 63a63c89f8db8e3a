"""Writes tiny vision-language models with random weights whose pictures are stacks of tiles, for tests that see."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from attrs import frozen
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

from turnwise_tiny_models.model import save
from turnwise_tiny_models.random_vision import draw_weights
from turnwise_tiny_models.tokenizer import IMAGE_PAD, VISION_CHATML, VISION_END, VISION_START, byte_level_tokenizer

TileKind = Literal["internvl", "idefics3", "smolvlm", "llava", "llava_next"]

TILE: Final = 16
"""Pixels on a side of a tile."""
_PATCH: Final = 4
_SHOWN: Final = VISION_START + IMAGE_PAD + VISION_END
_MARKS: Final = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_CELLS: Final = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
_INTERN_NAMES: Final = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_SIZE: Final = {"height": TILE, "width": TILE}
_CUTS: Final = {"image_grid_pinpoints": [[TILE, 2 * TILE], [2 * TILE, TILE], [2 * TILE, 2 * TILE]]}
_CROP: Final = {"size": {"shortest_edge": TILE}, "crop_size": _SIZE}
_TILED: Final = {"size": {"longest_edge": 2 * TILE}, "max_image_size": {"longest_edge": TILE}}
_CLIP: Final = {"patch_size": _PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}

_VISION: Final = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": TILE,
    "patch_size": _PATCH,
    # A trainer has to turn it off, as the engine does.
    "attention_dropout": 0.1,
}


@frozen(kw_only=True)
class _Tiles:
    """
    A kind of model.

    Attributes:
        processor: its class without the end `Processor`.
        images: the class of the image processor without the end `ImageProcessor`; empty if it has the same name.
        token: that the template writes for a picture, and that the processor repeats.
        special: further special tokens.
        names: of special tokens, as the processor asks the tokenizer for them.
        text: the text model's type.
        vision: type of the vision tower; empty if the family has one.
        options: of the model's config.
        image_options: of the image processor.
        processor_options: of the processor.
    """

    processor: str
    images: str = ""
    token: str = "<image>"
    special: tuple[str, ...] = ()
    names: Mapping[str, str] = {}
    text: str = "llama"
    vision: str = ""
    options: Mapping[str, Any] = {}
    image_options: Mapping[str, Any] = {}
    processor_options: Mapping[str, Any] = {}


_KINDS: Final[Mapping[TileKind, _Tiles]] = {
    "internvl": _Tiles(
        processor="InternVL",
        images="GotOcr2",
        token="<IMG_CONTEXT>",
        special=tuple(_INTERN_NAMES.values()),
        names=_INTERN_NAMES,
        text="qwen2",
        options={"downsample_ratio": 0.5},
        # As the public models have it: the processor of texts and pictures turns it on.
        image_options={"size": _SIZE, "crop_to_patches": False, "min_patches": 1, "max_patches": 4},
        processor_options={"image_seq_length": 4},
    ),
    "idefics3": _Tiles(
        processor="Idefics3",
        special=(*_MARKS, *_CELLS),
        options={"scale_factor": 2},
        image_options=_TILED,
        processor_options={"image_seq_len": 4},
    ),
    "smolvlm": _Tiles(
        processor="SmolVLM",
        special=(*_MARKS, *_CELLS),
        options={"scale_factor": 2},
        image_options=_TILED,
        processor_options={"image_seq_len": 4},
    ),
    "llava": _Tiles(
        processor="Llava", images="CLIP", vision="clip_vision_model", image_options=_CROP, processor_options=_CLIP
    ),
    "llava_next": _Tiles(
        processor="LlavaNext",
        text="mistral",
        vision="clip_vision_model",
        options=_CUTS,
        image_options=_CROP | _CUTS,
        processor_options=_CLIP,
    ),
}


def save_random_tiles(kind: TileKind, folder: Path, *, options: Mapping[str, object] | None = None) -> Path:
    """
    Write a vision-language model whose answers depend on pictures, and return its folder.

    It has the chat template and the processors of its family, and the same weights each time.

    Args:
        kind: the family.
        folder: to write.
        options: further ones of the text model's config.
    """
    tiles = _KINDS[kind]
    special = tuple(dict.fromkeys((tiles.token, *tiles.special)))
    template = VISION_CHATML.replace(_SHOWN, tiles.token)
    tokenizer = byte_level_tokenizer(["a red circle"] * 3, 300, special_tokens=special, chat_template=template)
    model = draw_weights(_make_model(kind, tiles, tokenizer, options or {}))
    save(model, tokenizer, folder)
    _add_entries(folder / "tokenizer_config.json", {"extra_special_tokens": dict(tiles.names)} if tiles.names else {})
    images = f"{tiles.images or tiles.processor}ImageProcessor"
    _add_entries(folder / "preprocessor_config.json", {"image_processor_type": images, **tiles.image_options})
    named = {"processor_class": f"{tiles.processor}Processor", **tiles.processor_options}
    _add_entries(folder / "processor_config.json", named)
    return folder


def _make_model(
    kind: TileKind, tiles: _Tiles, tokenizer: PreTrainedTokenizerFast, options: Mapping[str, object]
) -> Any:
    from transformers import CONFIG_MAPPING

    text = {
        "model_type": tiles.text,
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": tokenizer.model_max_length,
        "sliding_window": None,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **options,
    }
    vision = dict(_VISION) | ({"model_type": tiles.vision} if tiles.vision else {})
    make: Any = CONFIG_MAPPING[kind]
    config = make(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids(tiles.token),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        dtype="float32",
        **tiles.options,
    )
    loader: Any = AutoModelForImageTextToText
    return loader.from_config(config)


def _add_entries(file: Path, entries: Mapping[str, object]) -> None:
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps(found | dict(entries), indent=2) + "\n", encoding="utf-8")
