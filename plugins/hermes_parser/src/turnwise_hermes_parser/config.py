"""Options of the parser `hermes`."""

from __future__ import annotations

from attrs import field, frozen, validators


@frozen(kw_only=True)
class HermesConfig:
    """
    How calls are written.

    Attributes:
        open_tag: before a call.
        close_tag: after it.
        reasoning_open_tag: begins reasoning, in which tags mean nothing; empty when the model has none.
        reasoning_close_tag: ends it.
        starts_in_reasoning: the chat template itself opens the reasoning at the end of the prompt, so that a turn
            begins inside it.
        max_depth: how deeply a call's JSON may nest.
    """

    open_tag: str = field(default="<tool_call>", validator=validators.min_len(1))
    close_tag: str = field(default="</tool_call>", validator=validators.min_len(1))
    reasoning_open_tag: str = "<think>"
    reasoning_close_tag: str = "</think>"
    starts_in_reasoning: bool = False
    max_depth: int = field(default=64, validator=[validators.ge(2), validators.le(200)])

    def __attrs_post_init__(self) -> None:
        """Refuse tags that cannot be told apart."""
        if bool(self.reasoning_open_tag) != bool(self.reasoning_close_tag):
            raise ValueError("reasoning_open_tag and reasoning_close_tag: give both, or two empty strings for none")
        if self.starts_in_reasoning and not self.reasoning_close_tag:
            raise ValueError("starts_in_reasoning needs a reasoning_close_tag")
        tags = [self.open_tag, self.close_tag, self.reasoning_open_tag, self.reasoning_close_tag]
        given = [tag for tag in tags if tag]
        for tag in given:
            if sum(tag in other for other in given) > 1:
                raise ValueError(f"the tag {tag!r} is also found in another tag")
