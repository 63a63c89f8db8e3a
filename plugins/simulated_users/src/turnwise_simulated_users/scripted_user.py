"""The interaction `scripted_user`: a user who says the same to every answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import define, field

from turnwise import Message, Reply, Task
from turnwise.errors import DataError
from turnwise_simulated_users.config import ScriptedUserConfig
from turnwise_simulated_users.task_columns import find_column


@define
class Script:
    """The messages of one episode that are not yet said."""

    rest: list[str] = field(factory=list)


class ScriptedUser:
    """Says the messages of a script, one after each answer."""

    def __init__(self, config: ScriptedUserConfig) -> None:
        self._config = config
        self._stops = tuple(text.casefold() for text in config.stop_when)

    async def create(self, task: Task) -> Script:
        """Start the script; `DataError` when the task's own one is no list of texts."""
        own = find_column(task, self._config.column)
        if own is None:
            return Script(list(self._config.replies))
        if not isinstance(own, list) or not all(isinstance(reply, str) for reply in own):
            raise DataError(f"task {task.uid}: {self._config.column} must be a list of texts, got {own!r}")
        return Script(list(own))

    async def respond(self, session: Any, messages: Sequence[Message]) -> Reply:
        script: Script = session
        answer = str(messages[-1].get("content") or "").casefold()
        if not script.rest or any(text in answer for text in self._stops):
            return Reply(should_terminate=True)
        return Reply(content=script.rest.pop(0))

    async def release(self, session: object) -> None:
        """Do nothing: a script holds nothing."""

    async def suspend(self, session: Any) -> list[str]:
        """Return the messages that are not yet said, for a later part of the episode."""
        script: Script = session
        return list(script.rest)

    async def restore(self, task: Task, notes: Any) -> Script:
        """Continue with the messages of `suspend`."""
        return Script(list(notes))
