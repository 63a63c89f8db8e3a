"""
Proof that a processor writes each picture of a text as it writes the picture alone, and leaves the text as it is.

A record grows by turns, so the text of a picture must not depend on pictures that come later. LLaVA-OneVision cuts a
picture into tiles only if the conversation has no other one, and PaliGemma writes marks around the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from turnwise.errors import ConfigError

PROCESSOR_ERRORS: Final = (KeyError, IndexError, TypeError, ValueError, AttributeError)
"""That processors raise on pictures and arguments that they do not know."""
_SIZES: Final = ((32, 48), (60, 33), (120, 40), (32, 48))


def write_alone(processor: Any, image: Any) -> str:
    """
    Return the text that replaces the image token of a picture which is the only one of its text.

    Args:
        processor: of transformers.
        image: of pillow.

    Raises:
        PROCESSOR_ERRORS: the processor refuses the picture, or does not tell the text.
    """
    found = processor(text=[processor.image_token], images=[image], return_text_replacement_offsets=True)
    return str(found["text_replacement_offsets"][0][0]["replacement"])


def prove_processor(processor: Any, tokenizer: Any, folder: Path) -> None:
    """
    Raise `ConfigError` unless the ids of a text with some pictures have the text of each picture alone.

    Args:
        processor: of transformers.
        tokenizer: of the processor.
        folder: of the model, for errors.
    """
    from PIL import Image

    images = [Image.new("RGB", size) for size in _SIZES]
    subject = f"model.path: pictures for {type(processor).__name__} of {str(folder)!r} are not supported"
    token, encode = processor.image_token, {"add_special_tokens": False}
    # Two pictures touch, for some processors write a mark between pictures once.
    texts = ["one ", " two ", "", " three ", " four"]
    try:
        alone = [write_alone(processor, image) for image in images]
        found = processor(text=[token.join(texts)], images=[images], **encode)["input_ids"][0]
    except PROCESSOR_ERRORS as error:
        raise ConfigError(f"{subject}: it does not tell the text of a picture: {one_line(error)}") from error
    filled = texts[0] + "".join(each + text for each, text in zip(alone, texts[1:], strict=True))
    if list(found) != list(tokenizer(filled, **encode)["input_ids"]):
        reason = "it writes several pictures of a text otherwise than each alone, or changes the text beside them"
        raise ConfigError(f"{subject}: {reason}, so a record could not grow by turns")


def placeholder_ids(folder: Path, tokenizer: Any, processor: object) -> Iterator[int]:
    """
    Yield the ids that may be the placeholder of pictures, the surest first.

    The image token of a processor may be another one than the token that it repeats: Gemma's is a start mark, and
    Llama 4 writes one behind the parts of a picture. The config of a model has the id that features replace.
    """
    file = folder / "config.json"
    config = json.loads(file.read_bytes()) if file.is_file() else {}
    yield from (each for key in ("image_token_id", "image_token_index") if isinstance(each := config.get(key), int))
    names = [getattr(tokenizer, name, None) for name in ("image_token", "context_image_token")]
    names += [getattr(processor, name, None) for name in ("img_patch_token", "image_token")]
    yield from (tokenizer.convert_tokens_to_ids(each) for each in names if each)


def one_line(error: BaseException) -> str:
    """Return the text of an error as a line; its class if it has none."""
    return " ".join(str(error).split()) or type(error).__name__
