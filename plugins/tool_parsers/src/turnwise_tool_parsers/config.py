"""Options of the parsers."""

from __future__ import annotations

from typing import Final

from attrs import frozen

from turnwise_tool_formats.config import LimitConfig, ParserConfig


@frozen(kw_only=True)
class MistralConfig(ParserConfig):
    """
    Limits of calls, and tags around reasoning, in which the parser ignores calls.

    Attributes:
        reasoning_open_tag: before reasoning; empty if the model has none.
        reasoning_close_tag: after reasoning.
    """

    reasoning_open_tag: str = "[THINK]"
    reasoning_close_tag: str = "[/THINK]"


CONFIGS: Final[dict[str, type[LimitConfig]]] = {
    "gpt_oss": LimitConfig,
    "mistral": MistralConfig,
}
"""Config classes of formats, by name; all others have `ParserConfig`."""
