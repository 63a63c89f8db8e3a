"""Options that the parsers of all formats have."""

from __future__ import annotations

from attrs import field, frozen, validators


@frozen(kw_only=True)
class LimitConfig:
    """
    Limits of calls.

    Attributes:
        max_depth: deepest nesting of a call's arguments.
    """

    max_depth: int = field(default=64, validator=[validators.ge(2), validators.le(200)])


@frozen(kw_only=True)
class ParserConfig(LimitConfig):
    """
    Limits of calls, and tags around reasoning, in which the parser ignores calls.

    Attributes:
        reasoning_open_tag: before reasoning; empty if the model has none.
        reasoning_close_tag: after reasoning.
        starts_in_reasoning: a turn starts inside reasoning, because its prompt opens it; None asks the chat template.
    """

    reasoning_open_tag: str = "<think>"
    reasoning_close_tag: str = "</think>"
    starts_in_reasoning: bool | None = None

    def __attrs_post_init__(self) -> None:
        """Check the tags; `ValueError` when they do not fit together."""
        if bool(self.reasoning_open_tag) != bool(self.reasoning_close_tag):
            raise ValueError("reasoning_open_tag and reasoning_close_tag: set both, or set both to the empty string")
        if self.reasoning_open_tag and self.reasoning_open_tag == self.reasoning_close_tag:
            raise ValueError("reasoning_open_tag and reasoning_close_tag must differ")
        if self.starts_in_reasoning and not self.reasoning_close_tag:
            raise ValueError("starts_in_reasoning needs a reasoning_close_tag")
