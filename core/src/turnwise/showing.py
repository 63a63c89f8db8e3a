"""Pictures that a tool or an environment returns, as parts of messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from turnwise.errors import ConfigError, DataError, ToolError, boundary
from turnwise.media import Picture, is_picture_part, picture_part, read_picture, read_picture_part
from turnwise.protocols import Chat, PictureChat
from turnwise.types import Message


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
