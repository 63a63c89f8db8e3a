"""Options of the parsers."""

from __future__ import annotations

from typing import Final

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


@frozen(kw_only=True)
class HermesConfig(ParserConfig):
    """
    Tags around calls, limits of calls, and tags around reasoning, in which the parser ignores calls.

    Attributes:
        open_tag: before a call.
        close_tag: after a call.
    """

    open_tag: str = field(default="<tool_call>", validator=validators.min_len(1))
    close_tag: str = field(default="</tool_call>", validator=validators.min_len(1))

    def __attrs_post_init__(self) -> None:
        """Check that the tags are distinct; `ValueError` when they are not."""
        super().__attrs_post_init__()
        tags = [self.open_tag, self.close_tag, self.reasoning_open_tag, self.reasoning_close_tag]
        given = [tag for tag in tags if tag]
        for tag in given:
            if sum(tag in other for other in given) > 1:
                raise ValueError(f"the tag {tag!r} is also part of another tag: choose tags that differ")


CONFIGS: Final[dict[str, type[LimitConfig]]] = {
    "gpt_oss": LimitConfig,
    "hermes": HermesConfig,
    "mistral": MistralConfig,
}
"""Config classes of formats, by name; all others have `ParserConfig`."""
