"""Options of the agent `tool_agent`, with the names of verl's `multi_turn` section."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen, validators

_at_least_one = validators.optional(validators.ge(1))


@frozen(kw_only=True)
class ToolAgentConfig:
    """
    Limits of a conversation, and truncation of tool responses.

    Attributes:
        system_prompt: inserted first in conversations that have no system message; empty inserts none.
        max_assistant_turns: most turns of the model; null lets only the budget limit them.
        max_user_turns: most turns that reply to the model, from tools or from the simulated user; null sets no limit.
        max_parallel_calls: calls of one turn that run, concurrently; each further call returns an error.
        max_tool_response_length: most characters of a tool's response, truncation mark included.
        tool_response_truncate_side: part that truncation removes: `left` the beginning, `right` the end, `middle` all
            but both ends (as in verl since 0.9; before, `left` kept the beginning there too).
        tools_in_prompt: the prompts of the tasks describe the tools, so the chat template need not show them.
    """

    system_prompt: str = ""
    max_assistant_turns: int | None = field(default=None, validator=_at_least_one)
    max_user_turns: int | None = field(default=None, validator=_at_least_one)
    max_parallel_calls: int = field(default=1, validator=validators.ge(1))
    max_tool_response_length: int = field(default=256, validator=validators.ge(1))
    tool_response_truncate_side: Literal["left", "right", "middle"] = field(
        default="middle", validator=validators.in_(("left", "right", "middle"))
    )
    tools_in_prompt: bool = False
