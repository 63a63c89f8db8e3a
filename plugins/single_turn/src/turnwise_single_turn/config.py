"""Options of the agent `single_turn`."""

from __future__ import annotations

from attrs import field, frozen, validators


@frozen(kw_only=True)
class SingleTurnConfig:
    """
    How the one turn is asked for.

    Attributes:
        system_prompt: put first in conversations that have no system message; empty for none.
        max_tokens: most tokens of the turn; null leaves it to the response budget.
    """

    system_prompt: str = ""
    max_tokens: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
