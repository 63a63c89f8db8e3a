"""
Parses tagged text, for training data and for the reward.

`parse_tagged_text` is strict and returns the structure; `is_well_formed` checks any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from attrs import field, frozen

from turnwise.errors import DataError
from turnwise_parallel_thinking.config import Tags


@frozen
class Block:
    """
    A block of a text.

    Attributes:
        paths: text of each path, without its tags.
        summary: text of the summary, without its tags.
    """

    paths: tuple[str, ...]
    summary: str


@frozen
class TaggedText:
    """
    A text with its blocks.

    Attributes:
        texts: text before, between and after the blocks; one more than there are blocks.
        blocks: the blocks, in order.
    """

    texts: tuple[str, ...]
    blocks: tuple[Block, ...] = field(default=())


def parse_tagged_text(text: str, tags: Tags) -> TaggedText:
    """
    Return the structure of a text. White space between the tags of a block is dropped.

    Raises:
        DataError: a tag is missing, unclosed or misplaced, or there is text between the tags of a block.
    """
    reader = _Reader(_split_tags(text, tags))
    texts, blocks = [reader.read_text()], []
    while reader.is_at(tags.block):
        blocks.append(_read_block(reader, tags))
        texts.append(reader.read_text())
    reader.expect_end()
    return TaggedText(tuple(texts), tuple(blocks))


def is_well_formed(text: str, tags: Tags, min_paths: int = 2) -> bool:
    """Return whether all tags are closed and in order, and every block has enough paths and a summary."""
    try:
        parsed = parse_tagged_text(text, tags)
    except DataError:
        return False
    return all(len(block.paths) >= min_paths for block in parsed.blocks)


def extract_paths(text: str, tags: Tags) -> list[list[str]]:
    """Return the complete paths of each complete block of any text, well formed or not."""
    blocks = re.findall(f"{re.escape(tags.block)}(.*?){re.escape(tags.end_block)}", text, re.DOTALL)
    path = f"{re.escape(tags.path)}(.*?){re.escape(tags.end_path)}"
    return [re.findall(path, block, re.DOTALL) for block in blocks]


def _read_block(reader: _Reader, tags: Tags) -> Block:
    reader.expect(tags.block)
    paths = []
    reader.skip_space()
    while reader.is_at(tags.path):
        reader.expect(tags.path)
        paths.append(reader.read_text())
        reader.expect(tags.end_path)
        reader.skip_space()
    reader.expect(tags.end_block)
    if not paths:
        raise DataError(f"a {tags.block} block has no {tags.path}")
    reader.skip_space()
    reader.expect(tags.summary)
    summary = reader.read_text()
    reader.expect(tags.end_summary)
    return Block(tuple(paths), summary)


def _split_tags(text: str, tags: Tags) -> Iterator[tuple[str, str]]:
    """Yield the pieces of a text as (`tag` or `text`, piece)."""
    names = [tags.block, tags.end_block, tags.path, tags.end_path, tags.summary, tags.end_summary]
    for piece in re.split("(" + "|".join(map(re.escape, names)) + ")", text):
        if piece:
            yield ("tag" if piece in names else "text"), piece


class _Reader:
    """A cursor over the pieces of a text."""

    def __init__(self, pieces: Iterator[tuple[str, str]]) -> None:
        self._pieces, self._index = list(pieces), 0

    def is_at(self, tag: str) -> bool:
        return self._pieces[self._index : self._index + 1] == [("tag", tag)]

    def expect(self, tag: str) -> None:
        """Advance past a tag; `DataError` if the next piece is not this tag."""
        if not self.is_at(tag):
            raise DataError(f"{tag} expected, found {self._describe_next()}")
        self._index += 1

    def read_text(self) -> str:
        """Advance past a text and return it; empty if the next piece is a tag."""
        if self._index < len(self._pieces) and self._pieces[self._index][0] == "text":
            self._index += 1
            return self._pieces[self._index - 1][1]
        return ""

    def skip_space(self) -> None:
        """Advance past white space; `DataError` for any other text."""
        text = self.read_text()
        if text.strip():
            raise DataError(f"only white space expected between the tags of a block, found {text.strip()[:40]!r}")

    def expect_end(self) -> None:
        """Raise `DataError` if a piece is left."""
        if self._index < len(self._pieces):
            raise DataError(f"{self._describe_next()} is misplaced")

    def _describe_next(self) -> str:
        return repr(self._pieces[self._index][1][:40]) if self._index < len(self._pieces) else "the end of the text"
