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

    @property
    def tags(self) -> tuple[str, str]:
        """The tags before and after reasoning."""
        return self.config.start, self.config.end

    def split(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the rest, each without whitespace beside a tag."""
        begins = text.lstrip().startswith(self.config.start)
        reasoning, end, rest = text.partition(self.config.end)
        if not (begins or end):
            return "", text
        if begins:
            reasoning = reasoning.lstrip().removeprefix(self.config.start)
        return reasoning.strip(), rest.lstrip()

    def settled(self, text: str) -> tuple[str, str]:
        """Return how the two parts of an unfinished text begin, however the text continues."""
        head, (reasoning, end, _rest) = text.lstrip(), text.partition(self.config.end)
        if end and not self.config.start.startswith(head):
            return self.split(text)
        if end or not head.startswith(self.config.start):
            return "", ""  # all of it is reasoning if an end tag comes, and content if none does
        reasoning = reasoning.lstrip().removeprefix(self.config.start)
        return reasoning[: len(reasoning) - overlap(reasoning, self.config.end)].strip(), ""


def overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of a text that is the start of a tag, and not all of it."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
