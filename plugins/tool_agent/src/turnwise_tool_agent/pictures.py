"""Pictures that tools return, as parts of messages."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise import Chat
from turnwise.errors import ConfigError, DataError, ToolError, boundary
from turnwise.media import Picture, picture_part
from turnwise.protocols import PictureChat


def show_pictures(text: str, pictures: Sequence[Picture], chat: Chat, tool: str) -> list[dict[str, object]]:
    """
    Return the content of a tool's result: its text, and the pictures behind it.

    Raises:
        ConfigError: the chat takes no pictures.
        BoundaryError: a picture cannot be used; the tool is at fault.
    """
    if not isinstance(chat, PictureChat):
        raise ConfigError(f"tool {tool!r} returned pictures, and the chat {type(chat).__name__} takes none")
    with boundary("tool", f"tool {tool!r}"):
        for picture in pictures:
            try:
                chat.check_picture(picture)
            except DataError as error:  # of the tool, and not of the data set
                raise ToolError(str(error)) from error
    texts: list[dict[str, object]] = [{"type": "text", "text": text}] if text else []
    return [*texts, *map(picture_part, pictures)]
