"""Options of the agent `tool_agent`; the names are those of verl's `multi_turn` section."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen, validators

_at_least_one = validators.optional(validators.ge(1))


@frozen(kw_only=True)
class ToolAgentConfig:
    """
    How long a conversation goes on, and what of a tool's answer the model sees.

    Attributes:
        system_prompt: put first in conversations that have no system message; empty for none.
        max_assistant_turns: turns of the model; null for as many as the budget holds.
        max_user_turns: turns that answer the model, of tools or of the simulated user; null for any number.
        max_parallel_calls: calls of one turn that are run, at the same time; each further one gets an error.
        max_tool_response_length: most characters of one answer of a tool, the mark of the cut included.
        tool_response_truncate_side: which part of a longer answer stays: `left` the beginning, `right` the end,
            `middle` both ends (verl's meaning of these words).
    """

    system_prompt: str = ""
    max_assistant_turns: int | None = field(default=None, validator=_at_least_one)
    max_user_turns: int | None = field(default=None, validator=_at_least_one)
    max_parallel_calls: int = field(default=1, validator=validators.ge(1))
    max_tool_response_length: int = field(default=256, validator=validators.ge(1))
    tool_response_truncate_side: Literal["left", "right", "middle"] = field(
        default="middle", validator=validators.in_(("left", "right", "middle"))
    )
