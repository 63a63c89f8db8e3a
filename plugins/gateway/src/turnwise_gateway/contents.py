"""
Contents of messages: a text, or parts if a picture is among them.

The parts have the form of `turnwise.media`: ``{"type": "text", "text": ...}`` and pictures as `data:` URLs. Texts
beside each other are one part, so that a conversation has one form, however a client divides its texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from turnwise import Message
from turnwise.media import is_picture_part

Part = dict[str, Any]
Content = str | list[Part]
PartsKey = tuple[tuple[str, str], ...]
"""The type of each part, and its text or URL."""


def build_content(parts: Iterable[Part], separator: str) -> Content:
    """Return the content of parts, with a separator between texts beside each other."""
    given = list(parts)
    if not any(map(is_picture_part, given)):
        return separator.join(part["text"] for part in given)
    content: list[Part] = []
    for part in given:
        if is_picture_part(part):
            content.append(part)
        elif part["text"] and content and not is_picture_part(content[-1]):
            content[-1] = text_part(content[-1]["text"] + separator + part["text"])
        elif part["text"]:
            content.append(part)
    return content


def text_part(text: str) -> Part:
    """Return a text as a part."""
    return {"type": "text", "text": text}


def has_parts(message: Message) -> bool:
    """Return whether the content of a message has pictures."""
    return isinstance(message.get("content"), list)


def text_of(content: Any) -> str:
    """Return the texts of a content, with a line break between them."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if not is_picture_part(part))
    return content or ""


def parts_key(content: Any) -> PartsKey:
    """Return what two equal contents with pictures share; white space at the ends of a text does not count."""
    listed = (
        ("image_url", part["image_url"]["url"]) if is_picture_part(part) else ("text", part["text"].strip())
        for part in content
    )
    return tuple(each for each in listed if each[1])


def is_readable(content: object) -> bool:
    """Return whether a content of a data set has the form of this module, perhaps with texts beside each other."""
    if content is None or isinstance(content, str):
        return True
    return isinstance(content, list) and all(_is_part(part) for part in content)


def _is_part(part: object) -> bool:
    if not isinstance(part, Mapping):
        return False
    if part.get("type") == "image_url":
        held = part.get("image_url")
        return isinstance(held, Mapping) and isinstance(held.get("url"), str)
    return part.get("type") == "text" and isinstance(part.get("text"), str)
