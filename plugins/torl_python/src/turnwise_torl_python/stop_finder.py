"""
Finds a stop string on tokens, with any engine that knows stop token ids, however the model cuts it into tokens.

A stop string has no token id: "```output" may come as "```" and "output", as single characters, or inside a token that
goes on behind it. Stopping at every token that could complete it would stop at each token that begins with "t". So one
character of the stop string is chosen as the waypoint: every occurrence has a token that covers it, and the waypoint
is the character that the fewest ids of the vocabulary can cover in step with the string. The engine stops at these
ids. Then the text says which of three things holds: the string is complete; it may still become so, and the model goes
on for one token at a time; or it was a false alarm, and the model goes on freely.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any, Final

from attrs import frozen

from turnwise import Tokenizer
from turnwise.types import TokenArray

_BLOCK: Final = 1024
"""Ids that are asked for together when the end of the vocabulary is looked for."""


class Sight(Enum):
    """What the text so far says about a stop string."""

    FOUND = "found"
    """It is there."""
    OPEN = "open"
    """The text ends in a beginning of it that covers the waypoint: the next token may complete it unseen."""
    NONE = "none"
    """The engine will stop before it can be complete."""


@frozen(kw_only=True)
class StopFinder:
    """
    A stop string and what to watch for.

    Attributes:
        stop: the string, never empty.
        waypoint: index of the character in it that the engine stops at.
        stop_token_ids: every id whose text covers that character in step with the string.
    """

    stop: str
    waypoint: int
    stop_token_ids: tuple[int, ...]

    def look(self, text: str) -> Sight:
        """Say what the text of a turn so far means for what comes next."""
        if self.stop in text:
            return Sight.FOUND
        longest = range(len(self.stop) - 1, self.waypoint, -1)
        return Sight.OPEN if any(text.endswith(self.stop[:length]) for length in longest) else Sight.NONE


def make_stop_finder(vocabulary: Iterable[tuple[int, str]], stop: str, sample_ids: Sequence[int] = ()) -> StopFinder:
    """
    Choose the waypoint of a stop string for a vocabulary.

    Args:
        vocabulary: every id with its text.
        stop: ASCII, so that a token that holds a part of a character changes nothing.
        sample_ids: what the model may write; any sample gives a finder that finds, a good one gives a quick one.
    """
    texts = dict(vocabulary)
    covering: list[list[int]] = [[] for _ in stop]
    letters = set(stop)
    for token_id, text in texts.items():
        if not letters.isdisjoint(text):
            for waypoint in _covered(text, stop):
                covering[waypoint].append(token_id)
    finders = [StopFinder(stop=stop, waypoint=index, stop_token_ids=tuple(ids)) for index, ids in enumerate(covering)]
    sample = [(token_id, texts[token_id]) for token_id in sample_ids]
    return min(finders, key=lambda finder: (_num_requests(finder, sample), len(finder.stop_token_ids)))


def _num_requests(finder: StopFinder, sample: Iterable[tuple[int, str]]) -> int:
    """Return how many requests end within a sample of ids with their texts."""
    stops, num_requests, written, sight = frozenset(finder.stop_token_ids), 0, "", Sight.NONE
    for token_id, text in sample:
        written += text
        if sight is Sight.OPEN or token_id in stops:
            num_requests += 1
            sight = finder.look(written)
        if sight is Sight.FOUND:
            written, sight = "", Sight.NONE
    return num_requests


def _covered(text: str, stop: str) -> set[int]:
    """Return the indices of the stop string that a token with this text covers in some occurrence of it."""
    covered: set[int] = set()
    for start in range(1 - len(stop), len(text)):
        first, last = max(0, -start), min(len(stop), len(text) - start)
        if text[start + first : start + last] == stop[first:last]:
            covered.update(range(first, last))
    return covered


def stop_finder(tokenizer: Tokenizer, stop: str, sample: str = "") -> StopFinder:
    """Return the finder of a stop string for a tokenizer; the vocabulary is read once for each of them."""
    key: Any = tokenizer  # a protocol does not say that its objects have a hash
    return _kept(key, stop, sample)


@lru_cache(maxsize=4)
def _kept(tokenizer: Any, stop: str, sample: str) -> StopFinder:
    return make_stop_finder(_vocabulary(tokenizer), stop, tokenizer.encode(sample))


def _vocabulary(tokenizer: Tokenizer) -> Iterator[tuple[int, str]]:
    """Yield every id with its text; the vocabulary ends where a whole block of ids has none."""
    start = 0
    while _text(tokenizer, range(start, start + _BLOCK)):
        for token_id in range(start, start + _BLOCK):
            yield token_id, _text(tokenizer, (token_id,))
        start += _BLOCK


def _text(tokenizer: Tokenizer, token_ids: Sequence[int] | TokenArray) -> str:
    """Return the text of ids of which some may not exist; slow tokenizers raise for these."""
    try:
        return tokenizer.decode(list(token_ids))
    except (IndexError, KeyError, OverflowError, TypeError, ValueError):
        if len(token_ids) == 1:
            return ""
    return "".join(_text(tokenizer, (token_id,)) for token_id in token_ids)
