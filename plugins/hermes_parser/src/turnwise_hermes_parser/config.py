"""Options of the parser `hermes`."""

from __future__ import annotations

from attrs import field, frozen, validators


@frozen(kw_only=True)
class HermesConfig:
    """
    Tags and limits of calls.

    Attributes:
        open_tag: before a call.
        close_tag: after a call.
        reasoning_open_tag: before reasoning, in which the parser ignores calls; empty if the model has none.
        reasoning_close_tag: after reasoning.
        starts_in_reasoning: the chat template ends the prompt with the opening tag, so a turn starts inside reasoning.
        max_depth: deepest nesting of a call's JSON, the call included.
    """

    open_tag: str = field(default="<tool_call>", validator=validators.min_len(1))
    close_tag: str = field(default="</tool_call>", validator=validators.min_len(1))
    reasoning_open_tag: str = "<think>"
    reasoning_close_tag: str = "</think>"
    starts_in_reasoning: bool = False
    max_depth: int = field(default=64, validator=[validators.ge(2), validators.le(200)])

    def __attrs_post_init__(self) -> None:
        """Check that tags are distinct; `ValueError` when they are not."""
        if bool(self.reasoning_open_tag) != bool(self.reasoning_close_tag):
            raise ValueError("reasoning_open_tag and reasoning_close_tag: set both, or set both to the empty string")
        if self.starts_in_reasoning and not self.reasoning_close_tag:
            raise ValueError("starts_in_reasoning needs a reasoning_close_tag")
        tags = [self.open_tag, self.close_tag, self.reasoning_open_tag, self.reasoning_close_tag]
        given = [tag for tag in tags if tag]
        for tag in given:
            if sum(tag in other for other in given) > 1:
                raise ValueError(f"the tag {tag!r} is also part of another tag: choose tags that differ")
