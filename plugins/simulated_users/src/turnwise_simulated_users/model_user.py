"""
The interaction `model_user`: a model plays a user with a goal, as in tau-bench (https://arxiv.org/abs/2406.12045).

The model is the run's judge. It sees the conversation with the roles exchanged: the assistant's messages are its
user's. Calls of tools and their results are not shown to it, because a user does not see them. It sees the pictures of
the other messages, which the judge's model, chat and engine must take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from attrs import define

from turnwise import Message, Reply, Resources, Task
from turnwise.errors import ConfigError, DataError
from turnwise.media import is_picture_part
from turnwise_simulated_users.config import ModelUserConfig
from turnwise_simulated_users.task_columns import find_column

_Content = str | list[dict[str, Any]]

_END_OF_REASONING: Final = "</think>"
"""Ends the reasoning of most models that write any; the run's parser is for the trained model."""


@define
class UserSession:
    """The instructions of an episode's user, and the number of messages that it has written."""

    instructions: str
    num_replies: int = 0


class ModelUser:
    """
    Asks the judge for the next message of the user.

    Args:
        config: goal, instructions and limits.
        resources: with a judge.

    Raises:
        ConfigError: the run has no judge.
    """

    def __init__(self, config: ModelUserConfig, resources: Resources) -> None:
        if resources.judge is None:
            raise ConfigError("interaction 'model_user' asks a model: add a section 'judge' to the config")
        self._config, self._judge = config, resources.judge

    async def create(self, task: Task) -> UserSession:
        """Read the goal of the task; `DataError` when there is none."""
        found = find_column(task, self._config.column)
        goal = self._config.goal if found is None else found
        if not isinstance(goal, str) or not goal.strip():
            raise DataError(f"task {task.uid}: the user has no goal: set {self._config.column} in the data to a text")
        # In this order, and by replacement: a goal may have braces.
        instructions = self._config.instructions.replace("{stop}", self._config.stop).replace("{goal}", goal.strip())
        return UserSession(instructions)

    async def respond(self, session: Any, messages: Sequence[Message]) -> Reply:
        opened: UserSession = session
        limit = self._config.max_replies
        if limit is not None and opened.num_replies >= limit:
            return Reply(should_terminate=True)
        text = await self._judge.ask(exchange_roles(opened.instructions, messages))
        text = text.rpartition(_END_OF_REASONING)[2]
        opened.num_replies += 1
        if self._config.stop in text or not text.strip():  # an empty message is no question to answer
            return Reply(should_terminate=True)
        return Reply(content=text.strip()[: self._config.max_reply_length])

    async def release(self, session: object) -> None:
        """Do nothing: the judge keeps no conversation."""

    async def suspend(self, session: Any) -> dict[str, Any]:
        """Return the session as JSON values, for a later part of the episode."""
        opened: UserSession = session
        return {"instructions": opened.instructions, "num_replies": opened.num_replies}

    async def restore(self, task: Task, notes: Any) -> UserSession:
        """Continue the session of `suspend`."""
        return UserSession(instructions=notes["instructions"], num_replies=notes["num_replies"])


def exchange_roles(instructions: str, messages: Sequence[Message]) -> list[Message]:
    """
    Return a conversation as the user's model reads it: its own messages are the assistant's.

    System messages, tool messages and turns without a text are left out. Neighbours of one role become one message,
    and the first message after the instructions is the assistant's, because chat templates ask for turns that
    alternate. Pictures of the user's own messages are at the end of the message before, with a mark in their places.
    """
    seen: list[dict[str, Any]] = [{"role": "system", "content": instructions}]
    for message in messages:
        content = _content_of(message)
        role = {"assistant": "user", "user": "assistant"}.get(str(message.get("role")))
        if role is None or not content:
            continue
        if len(seen) == 1 and role == "assistant":
            seen.append({"role": "user", "content": "Hi! How can I help you today?"})
        if role == "assistant" and isinstance(content, list):
            # Most chat templates show pictures in messages of the user alone.
            last = seen[-1] if seen[-1]["role"] == "user" else seen[-2]
            shown = [part for part in content if is_picture_part(part)]
            last["content"] = _join(last["content"], [_text_part("(Your next message shows:)"), *shown])
            content = "".join("[picture]" if is_picture_part(part) else part["text"] for part in content).strip()
        if seen[-1]["role"] == role:
            seen[-1]["content"] = _join(seen[-1]["content"], content)
        else:
            seen.append({"role": role, "content": content})
    if seen[-1]["role"] != "user":  # the assistant wrote no text
        seen.append({"role": "user", "content": "(The assistant says nothing.)"})
    return [*seen]


def _content_of(message: Message) -> _Content:
    """Return the content of a message: a text, or its texts and pictures in their order."""
    content = message.get("content")
    if not isinstance(content, list):
        return str(content or "").strip()
    if not any(map(is_picture_part, content)):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict)).strip()
    return [part for part in content if is_picture_part(part) or (isinstance(part, dict) and part.get("text"))]


def _join(first: _Content, second: _Content) -> _Content:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    head, tail = ([_text_part(each)] if isinstance(each, str) else each for each in (first, second))
    return [*head, _text_part("\n\n"), *tail]


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
