"""
The placeholder tokens of pictures, as the processor of a model's family writes them.

A template renders one image token for each picture, and the processor replaces it by a text whose length depends on the
picture's size. The processor is the class of transformers with the options of the model's directory, so all numbers
come from it. Its image processor works with pillow, so torchvision is not needed.

Pictures are decoded here first, so a run without such a check ends before an engine sees a bad one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import define, field, frozen

from turnwise.errors import ConfigError, DataError, TemplateError
from turnwise.media import decode_picture
from turnwise.types import MediaTokens, Picture, PlacedPicture, TokenArray
from turnwise_chat_templates.processor_proof import (
    PROCESSOR_ERRORS,
    one_line,
    placeholder_ids,
    prove_processor,
    write_alone,
)

_FILES: Final = ("preprocessor_config.json", "processor_config.json")
"""A directory of a model that takes pictures has one of them."""
_MAX_KNOWN: Final = 4096
Encode = Callable[[str], Any]


@frozen
class Expansion:
    """The text that replaces the image token of a picture, and the placeholders in its ids."""

    text: str
    num_placeholders: int


@define(eq=False)
class Placeholders:
    """
    Writes and finds the placeholders of pictures.

    Attributes:
        folder: of the model.
        tokenizer: of transformers.
        max_pixels: most pixels of a picture.
    """

    folder: Path
    tokenizer: Any
    max_pixels: int
    _processor: Any = field(default=None, init=False)
    _placeholder_id: int = field(default=-1, init=False)
    _known: dict[str, Expansion] = field(factory=dict, init=False)
    _lock: threading.RLock = field(factory=threading.RLock, init=False)

    @property
    def image_token(self) -> str:
        """The text that the template renders for a picture."""
        return str(self._load().image_token)

    def check(self, picture: Picture) -> None:
        """Raise `DataError` for a picture that no chat shows; the text names the reason."""
        self.expand(picture)

    def expand(self, picture: Picture) -> Expansion:
        """Return the expansion of a picture; errors as in `decode_picture`, `ConfigError` for an unknown processor."""
        with self._lock:
            known = self._known.get(picture.key)
            if known is None:
                known = self._expand(picture)
                if len(self._known) >= _MAX_KNOWN:
                    self._known.pop(next(iter(self._known)))
                self._known[picture.key] = known
            return known

    def fill(self, text: str, expansions: Sequence[Expansion]) -> str:
        """Return a text with an expansion for each image token; `TemplateError` if their numbers differ."""
        pieces = text.split(self.image_token)
        if len(pieces) != len(expansions) + 1:
            raise TemplateError(f"the chat template shows {len(pieces) - 1} pictures of {len(expansions)}")
        return pieces[0] + "".join(each.text + piece for each, piece in zip(expansions, pieces[1:], strict=True))

    def encode(self, text: str, pictures: Sequence[Picture], encode: Encode, *, num_before: int = 0) -> MediaTokens:
        """
        Return the ids of a rendered text with its pictures, without the first `num_before` ids.

        Args:
            text: with an image token for each picture.
            pictures: in the order of the text.
            encode: returns the ids of a text.
            num_before: ids of a text before, by which the rest was split.
        """
        expansions = [self.expand(picture) for picture in pictures]
        ids = np.asarray(encode(self.fill(text, expansions)), np.int32)[num_before:]
        return MediaTokens(token_ids=ids, pictures=self._find(ids, pictures, expansions))

    def _find(
        self, ids: TokenArray, pictures: Sequence[Picture], expansions: Sequence[Expansion]
    ) -> list[PlacedPicture]:
        """Return the places of pictures: from the first placeholder of each to its last."""
        places = np.flatnonzero(ids == self._placeholder_id)
        if len(places) != sum(each.num_placeholders for each in expansions):
            raise TemplateError("the text of a message spells the placeholder of a picture")
        found, first = [], 0
        for picture, expansion in zip(pictures, expansions, strict=True):
            own = places[first : first + expansion.num_placeholders]
            # A family that cuts a picture into tiles writes marks between their placeholders.
            found.append(PlacedPicture(start=int(own[0]), num_tokens=int(own[-1] - own[0]) + 1, picture=picture))
            first += expansion.num_placeholders
        return found

    def _expand(self, picture: Picture) -> Expansion:
        image, processor = decode_picture(picture, self.max_pixels), self._load()
        try:
            text = write_alone(processor, image)
        except PROCESSOR_ERRORS as error:
            name = type(processor).__name__
            raise DataError(f"the processor {name} refuses a picture of {image.size}: {one_line(error)}") from error
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Expansion(text, self._count(ids))

    def _count(self, ids: Sequence[int]) -> int:
        """Return the number of placeholders in the ids of an expansion."""
        if self._placeholder_id < 0:
            found = placeholder_ids(self.folder, self.tokenizer, self._processor)
            self._placeholder_id = next((each for each in found if each in ids), -1)
        if self._placeholder_id not in ids:
            raise ConfigError(f"model.path: the processor of {str(self.folder)!r} writes no known placeholder")
        return list(ids).count(self._placeholder_id)

    def _load(self) -> Any:
        with self._lock:
            if self._processor is None:
                processor = load_processor(self.folder, self.tokenizer)
                prove_processor(processor, self.tokenizer, self.folder)
                self._processor = processor
            return self._processor


def takes_pictures(folder: Path) -> bool:
    """Return whether the directory of a model has the config of an image processor."""
    return any((folder / name).is_file() for name in _FILES)


def load_processor(folder: Path, tokenizer: object) -> Any:
    """
    Return the processor of a model's family, with parts for texts and pictures alone.

    Args:
        folder: of the model.
        tokenizer: of transformers.

    Raises:
        ConfigError: pillow or the class is missing, or the config of the processor cannot be read.
    """
    try:
        import PIL.Image  # noqa: F401 - transformers would name another package
        import transformers
    except ImportError as error:
        raise ConfigError("pictures need `pip install 'turnwise-chat-templates[pictures]'`") from error
    name = _class_name(folder)
    try:
        found = getattr(transformers, name, None) if name else None
    except ImportError as error:  # of a package that the class needs
        raise ConfigError(f"model.path: transformers cannot import {name!r}{_hint(error)}") from error
    if found is None:
        raise ConfigError(f"model.path: transformers has no processor for {str(folder)!r} ({name or 'none is named'})")
    try:
        loader: Any = transformers.AutoImageProcessor
        images = loader.from_pretrained(str(folder), local_files_only=True, backend="pil")
        # The processors of films need torchvision, and no message has a film.
        partial: Any = type(name, (found,), {"check_argument_for_proper_class": lambda *_arguments: None})
        parts = {"image_processor": images, "tokenizer": tokenizer}
        arguments = [parts.get(each) for each in found.get_attributes()]
        options, _unused = found.get_processor_dict(str(folder), local_files_only=True)
        return partial.from_args_and_dict(arguments, options)
    except Exception as error:
        reason = one_line(error)[:200] + _hint(error)
        raise ConfigError(f"model.path: no processor can be loaded from {str(folder)!r}: {reason}") from error


def _hint(error: Exception) -> str:
    """Return the package that a processor lacks, which the text of transformers names late or not at all."""
    text = str(error).lower()
    named = "pip install" in text and "torchvision" not in text
    lacks = (isinstance(error, ImportError) or "torchvision" in text) and not named and not find_spec("torchvision")
    return "; it may need `pip install torchvision`" if lacks else ""


def _class_name(folder: Path) -> str:
    """Return the class that the model names; else the one of its family."""
    configs = [json.loads((folder / name).read_bytes()) for name in reversed(_FILES) if (folder / name).is_file()]
    for config in configs:
        if isinstance(config.get("processor_class"), str):
            return str(config["processor_class"])
    from transformers.models.auto import processing_auto

    file = folder / "config.json"
    model_type = json.loads(file.read_bytes()).get("model_type") if file.is_file() else None
    names: Any = processing_auto
    return str(names.PROCESSOR_MAPPING_NAMES.get(model_type) or "")
