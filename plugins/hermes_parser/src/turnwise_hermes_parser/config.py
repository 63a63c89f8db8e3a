"""Options of the parser."""

from __future__ import annotations

from attrs import field, frozen, validators

from turnwise_tool_formats.config import ParserConfig


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
