"""Parts of messages that several formats need."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from turnwise.errors import DataError
from turnwise.media import Picture, is_picture_part, read_picture_part
from turnwise.record.result import EpisodeResult
from turnwise.types import Message
from turnwise_strict_json import read_arguments


def has_pictures(result: EpisodeResult) -> bool:
    """Return whether the messages or the records of an episode have pictures."""
    return any(map(shows_picture, result.messages)) or any(record.pictures for record in result.trajectories)


def shows_picture(message: Message) -> bool:
    """Return whether a content has a picture among its parts."""
    return any(map(is_picture_part, _parts_of(message)))


def refuse_pictures(result: EpisodeResult, form: str) -> None:
    """Raise `DataError` for an episode with pictures, which a form of export has no place for."""
    if has_pictures(result):
        raise DataError(f"episode {result.uid} has pictures, and {form} has no place for them")


def contents_of(result: EpisodeResult) -> list[list[str | Picture]]:
    """
    Return the texts and the pictures of each message of an episode, in their order.

    Raises:
        DataError: a picture of a message has no known form, or a record has a picture that no message shows.
    """
    try:
        contents = [_content_of(message) for message in result.messages]
    except DataError as error:
        raise DataError(f"episode {result.uid}: {error}") from error
    shown = {part.key for content in contents for part in content if isinstance(part, Picture)}
    recorded = {each.picture.key for record in result.trajectories for each in record.pictures}
    if missing := sorted(recorded - shown):
        raise DataError(f"episode {result.uid}: no message shows the picture {missing[0][:12]} of its record")
    return contents


def _content_of(message: Message) -> list[str | Picture]:
    if not shows_picture(message):
        return [text_of(message)]
    parts: list[str | Picture] = []
    for part in _parts_of(message):
        if is_picture_part(part):
            parts.append(read_picture_part(part))
        elif isinstance(part, Mapping) and part.get("text"):
            parts.append(str(part["text"]))
    return parts


def _parts_of(message: Message) -> Sequence[object]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


def text_of(message: Message) -> str:
    """Return the text of a message; the parts of a list are joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def calls_of(message: Message) -> Iterator[tuple[str, str, str]]:
    """Yield the id, the name and the arguments as text of each tool call of a message; one of no known form is text."""
    calls = message.get("tool_calls") or ()
    for call in calls if isinstance(calls, list | tuple) else (calls,):
        function = call.get("function") or {} if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            yield "", "", json.dumps(call, ensure_ascii=False)
            continue
        arguments = function.get("arguments", "{}")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield str(call.get("id", "")), str(function.get("name", "")), text


def is_malformed(message: Message) -> bool:
    """Return whether a turn has a call without a name, or whose arguments are no JSON object."""
    return any(not name or read_arguments(arguments) is None for _, name, arguments in calls_of(message))
