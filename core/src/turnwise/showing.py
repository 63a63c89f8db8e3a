"""
Pictures that a tool or an environment returns, as parts of messages.

A result of a tool may have pictures between its texts. Its text is the texts joined by nothing, and each picture has a
place in it. So a wrapper that replaces the text loses no picture, and code that reads texts alone finds all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

from attrs import evolve

from turnwise.errors import ConfigError, DataError, ToolError, boundary
from turnwise.media import Picture, is_picture_part, picture_part, read_picture, read_picture_part
from turnwise.protocols import Chat, PictureChat
from turnwise.types import Message, ToolResult


def join_parts(parts: Iterable[str | Picture], separator: str = "\n", **others: Any) -> ToolResult:
    """
    Return a result whose texts and pictures the model sees in this order.

    Args:
        parts: texts and pictures.
        separator: between two texts beside each other.
        others: further attributes of the result.
    """
    text, pictures, places, is_behind_text = "", list[Picture](), list[int](), False
    for part in parts:
        if isinstance(part, str):
            text += separator + part if is_behind_text else part
        else:
            pictures.append(part)
            places.append(len(text))
        is_behind_text = isinstance(part, str)
    return ToolResult(text=text, pictures=tuple(pictures), picture_places=tuple(places), **others)


def split_parts(result: ToolResult) -> list[str | Picture]:
    """Return the texts and pictures of a result in their order, without empty texts."""
    parts: list[str | Picture] = []
    start = 0
    for picture, place in zip(result.pictures, _places(result), strict=True):
        parts += [result.text[start:place], picture]
        start = place
    return [part for part in (*parts, result.text[start:]) if part != ""]


def change_texts(result: ToolResult, change: Callable[[str], str]) -> ToolResult:
    """Return a result with each of its texts changed; its pictures stay between the same texts."""
    if not result.pictures:
        return evolve(result, text=change(result.text))
    made = join_parts((change(part) if isinstance(part, str) else part for part in split_parts(result)), "")
    return evolve(result, text=made.text, picture_places=made.picture_places)


def cut_text(result: ToolResult, head: int, tail: int, mark: str) -> ToolResult:
    """
    Return a result without the middle of its text, and with all of its pictures.

    Args:
        result: its text has more than `head + tail` characters.
        head: characters that stay at the beginning.
        tail: characters that stay at the end.
        mark: a text in the gap. The pictures of the gap are behind it.
    """
    text = result.text
    gap = head + len(mark)
    end = len(text) - tail
    places = [place if place <= head else gap + max(0, place - end) for place in _places(result)]
    return evolve(result, text=text[:head] + mark + text[end:], picture_places=tuple(places))


def _places(result: ToolResult) -> list[int]:
    """Return a place in the text for each picture, ascending."""
    size, last, places = len(result.text), 0, []
    for _picture, place in zip_longest(result.pictures, result.picture_places[: len(result.pictures)]):
        last = max(last, size if place is None else min(place, size))
        places.append(last)
    return places


def show_result(result: ToolResult, chat: Chat, name: str) -> str | list[dict[str, object]]:
    """Return the content of a message for the result of a tool with this name; errors as in `show_pictures`."""
    if not result.pictures:
        return result.text
    _check(result.pictures, chat, f"tool {name!r}")
    return [
        {"type": "text", "text": part} if isinstance(part, str) else picture_part(part) for part in split_parts(result)
    ]


def show_pictures(text: str, pictures: Sequence[Picture], chat: Chat, source: str) -> list[dict[str, object]]:
    """
    Return the content of a message: a text, and pictures behind it.

    Args:
        text: of the result or the observation; an empty one has no part.
        pictures: at least one.
        chat: of the run.
        source: names what returned them in errors, such as "tool 'camera'".

    Raises:
        ConfigError: the chat takes no pictures.
        BoundaryError: a picture cannot be used; the tool is at fault.
    """
    _check(pictures, chat, source)
    texts: list[dict[str, object]] = [{"type": "text", "text": text}] if text else []
    return [*texts, *map(picture_part, pictures)]


def check_shown(messages: Iterable[Message], chat: Chat, source: str) -> None:
    """Check the pictures of messages that a tool or an environment has written; errors as in `show_pictures`."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    found = []
    with boundary("tool", source):
        for part in filter(is_picture_part, parts):
            try:
                found.append(read_picture_part(part))
            except DataError as error:
                raise ToolError(f"{source}: {error}") from error
    if found:
        _check(found, chat, source)


def _check(pictures: Sequence[Picture], chat: Chat, source: str) -> None:
    if not isinstance(chat, PictureChat):
        raise ConfigError(f"{source} returned pictures, and the chat {type(chat).__name__} takes none")
    with boundary("tool", source):
        for picture in pictures:
            try:
                read_picture(picture.data, f"picture {picture.key[:12]}")  # which may have been made without it
                chat.check_picture(picture)
            except DataError as error:  # of the tool, and not of the data set
                raise ToolError(f"{source}: {error}") from error
