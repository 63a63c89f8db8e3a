"""Contents with pictures: as templates get them, and the pictures in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.errors import TemplateError
from turnwise.media import Picture, is_picture_part, read_picture_part
from turnwise.types import Message

Shape = tuple[str, ...] | None
"""The types of the parts of a content; None for a text."""
_IMAGE = "image"


def has_pictures(message: Message) -> bool:
    """Return whether a content has a picture among its parts."""
    content = message.get("content")
    return isinstance(content, Sequence) and not isinstance(content, str | bytes) and any(map(is_picture_part, content))


def pictures_of(messages: Sequence[Message]) -> list[Picture]:
    """Return the pictures of messages, in their order; `DataError` for one in another form than `read_picture_part`."""
    return [
        read_picture_part(part)
        for message in messages
        if has_pictures(message)
        for part in message["content"]
        if is_picture_part(part)
    ]


def plain_parts(message: Message) -> list[dict[str, str]]:
    """Return the parts of a content with pictures, as templates expect them; `TemplateError` for another part."""
    return [_plain_part(part) for part in message["content"]]


def shape_of(message: Mapping[str, object]) -> Shape:
    """Return the shape of a plain content."""
    content = message.get("content")
    return tuple(str(part["type"]) for part in content) if isinstance(content, list) else None


def texts_of(message: Mapping[str, object]) -> list[str]:
    """Return the texts of a plain content."""
    content = message.get("content")
    if isinstance(content, list):
        return [part["text"] for part in content if "text" in part]
    return [content] if isinstance(content, str) else []


def with_shape(message: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """Return a plain message whose text became the first text of a content of a shape, and marks the others."""
    if shape is None:
        return message
    number, parts = 0, []
    for kind in shape:
        if kind == _IMAGE:
            parts.append({"type": _IMAGE})
            continue
        parts.append({"type": "text", "text": f"{message['content']}{number or ''}"})
        number += 1
    return {**message, "content": parts}


def _plain_part(part: object) -> dict[str, str]:
    if is_picture_part(part):
        return {"type": _IMAGE}
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise TemplateError(f"the content of a message may hold parts of type 'text' and 'image_url' only, not {kind!r}")
