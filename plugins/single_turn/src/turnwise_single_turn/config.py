"""Options of the agent `single_turn`."""

from __future__ import annotations

from attrs import field, frozen, validators


@frozen(kw_only=True)
class SingleTurnConfig:
    """
    Prompt and length of the turn.

    Attributes:
        system_prompt: inserted first in conversations that have no system message; empty inserts none.
        max_tokens: most tokens of the turn; null lets only the response budget limit it.
    """

    system_prompt: str = ""
    max_tokens: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
