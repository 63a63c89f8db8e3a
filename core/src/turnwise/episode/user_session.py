"""An episode's session of the simulated user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import define, field

from turnwise.protocols import Interaction
from turnwise.tools.session import can_suspend, create_session
from turnwise.types import Message, Reply, Task


@define(eq=False)
class UserSession:
    """
    Creates the session with the first question, and releases or suspends it at the end.

    Attributes:
        interaction: the simulated user.
        task: of the episode.
        notes: result of `suspend` in an earlier part of the episode, from which the session is restored.
        is_open: whether the session exists.
    """

    interaction: Interaction
    task: Task
    notes: Any = None
    _session: object = field(default=None, init=False)
    is_open: bool = field(default=False, init=False)

    async def respond(self, messages: Sequence[Message]) -> Reply:
        """Return the user's reply to a conversation."""
        if not self.is_open:
            self._session = await create_session(self.interaction, self.task, self.notes)
            self.is_open = True
        reply: object = await self.interaction.respond(self._session, messages)
        if not isinstance(reply, Reply):
            raise TypeError(f"respond returned {reply!r}, expected a Reply")
        return reply

    async def suspend(self) -> Any:
        """Suspend an open session if the user supports it, and return the notes for the next part of the episode."""
        interaction: object = self.interaction  # widened, because `can_suspend` narrows to another protocol
        if self.is_open and can_suspend(interaction):
            self.notes = await interaction.suspend(self._session)
            self.is_open = False
        return self.notes

    async def release(self) -> None:
        await self.interaction.release(self._session)
