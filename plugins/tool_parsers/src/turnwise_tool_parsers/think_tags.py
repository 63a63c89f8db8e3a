"""The reasoning parser `think_tags`: splits a turn at the tags around its reasoning."""

from __future__ import annotations

from attrs import field, frozen, validators


@frozen(kw_only=True)
class ThinkTagsConfig:
    """
    The tags.

    Attributes:
        start: before the reasoning; a template may have written it into the prompt, so a turn may lack it.
        end: after the reasoning.
    """

    start: str = field(default="<think>", validator=validators.min_len(1))
    end: str = field(default="</think>", validator=validators.min_len(1))


@frozen
class ThinkTags:
    """Takes the text before the first end tag as reasoning; after a start tag without an end, all text is reasoning."""

    config: ThinkTagsConfig

    def split(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the rest, each without whitespace beside a tag."""
        begins = text.lstrip().startswith(self.config.start)
        reasoning, end, rest = text.partition(self.config.end)
        if not (begins or end):
            return "", text
        if begins:
            reasoning = reasoning.lstrip().removeprefix(self.config.start)
        return reasoning.strip(), rest.lstrip()
