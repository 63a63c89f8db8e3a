"""
Tagged text as a structure, for training data and for judging what a model wrote.

`parse` reads a text once, strictly; `is_well_formed` says of any text whether all tags in it are in their place.
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
    A text with its blocks cut out.

    Attributes:
        texts: what stands before, between and behind the blocks; one more than there are blocks.
        blocks: the blocks.
    """

    texts: tuple[str, ...]
    blocks: tuple[Block, ...] = field(default=())


def parse(text: str, tags: Tags) -> TaggedText:
    """
    Read a text.

    White space between the tags of a block belongs to nobody and is dropped.

    Raises:
        DataError: a tag is missing, unclosed or out of its place, or text stands where no token has a place.
    """
    reader = _Reader(_pieces(text, tags), tags)
    texts, blocks = [reader.text()], []
    while reader.at(tags.block):
        blocks.append(_block(reader, tags))
        texts.append(reader.text())
    reader.end()
    return TaggedText(tuple(texts), tuple(blocks))


def is_well_formed(text: str, tags: Tags, min_paths: int = 2) -> bool:
    """Return whether every tag is closed and in its place, each block has enough paths, and a summary follows it."""
    try:
        parsed = parse(text, tags)
    except DataError:
        return False
    return all(len(block.paths) >= min_paths for block in parsed.blocks)


def paths_of(text: str, tags: Tags) -> list[list[str]]:
    """Return the paths of each block; those of a text that is not well formed as far as they can be told."""
    blocks = re.findall(f"{re.escape(tags.block)}(.*?){re.escape(tags.end_block)}", text, re.DOTALL)
    path = f"{re.escape(tags.path)}(.*?){re.escape(tags.end_path)}"
    return [re.findall(path, block, re.DOTALL) for block in blocks]


def _block(reader: _Reader, tags: Tags) -> Block:
    reader.take(tags.block)
    paths = []
    reader.blank()
    while reader.at(tags.path):
        reader.take(tags.path)
        paths.append(reader.text())
        reader.take(tags.end_path)
        reader.blank()
    reader.take(tags.end_block)
    if not paths:
        raise DataError(f"a {tags.block} block holds no {tags.path}")
    reader.blank()
    reader.take(tags.summary)
    summary = reader.text()
    reader.take(tags.end_summary)
    return Block(tuple(paths), summary)


def _pieces(text: str, tags: Tags) -> Iterator[tuple[str, str]]:
    """Yield (`tag` or `text`, piece) in turn."""
    names = [tags.block, tags.end_block, tags.path, tags.end_path, tags.summary, tags.end_summary]
    for piece in re.split("(" + "|".join(map(re.escape, names)) + ")", text):
        if piece:
            yield ("tag" if piece in names else "text"), piece


class _Reader:
    """Goes through the pieces of a text."""

    def __init__(self, pieces: Iterator[tuple[str, str]], tags: Tags) -> None:
        self._pieces, self._at, self._tags = list(pieces), 0, tags

    def at(self, tag: str) -> bool:
        """Return whether the next piece is this tag."""
        return self._pieces[self._at : self._at + 1] == [("tag", tag)]

    def take(self, tag: str) -> None:
        """Go on behind a tag."""
        if not self.at(tag):
            raise DataError(f"{tag} expected, found {self._found()}")
        self._at += 1

    def text(self) -> str:
        """Go on behind a text, which may be empty."""
        if self._at < len(self._pieces) and self._pieces[self._at][0] == "text":
            self._at += 1
            return self._pieces[self._at - 1][1]
        return ""

    def blank(self) -> None:
        """Go on behind white space."""
        text = self.text()
        if text.strip():
            raise DataError(f"text between tags, where no token has a place: {text.strip()[:40]!r}")

    def end(self) -> None:
        """Refuse what is left."""
        if self._at < len(self._pieces):
            raise DataError(f"{self._found()} out of its place")

    def _found(self) -> str:
        return repr(self._pieces[self._at][1][:40]) if self._at < len(self._pieces) else "the end of the text"
