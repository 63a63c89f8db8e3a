"""Makes the content of a message from an observation: a text, or parts with pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise import Chat
from turnwise.showing import check_shown, show_pictures
from turnwise_environments.protocol import Observation

Content = str | Sequence[Any]
"""Of a message."""


def show_observation(observation: Observation, chat: Chat, environment: str) -> Content:
    """Return the content of an observation, and check the pictures of its messages; errors as in `show_pictures`."""
    source = f"environment {environment!r}"
    check_shown(observation.messages, chat, source)
    if not observation.pictures:
        return observation.text
    return show_pictures(observation.text, observation.pictures, chat, source)


def join_contents(first: Content, second: Content) -> Content:
    """Return two contents as one, with an empty line between their texts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}".strip()
    head, tail = _parts(first), _parts(second)
    if head and tail and _is_text(head[-1]) and _is_text(tail[0]):
        joined = {**head[-1], "text": f"{head[-1]['text']}\n\n{tail[0]['text']}"}
        return [*head[:-1], joined, *tail[1:]]
    return [*head, *tail]


def _parts(content: Content) -> Sequence[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
