"""
Finds a stop string with any engine that stops at token ids, for any tokenization of the string.

A stop string has no token id: "```output" may be the tokens "```" and "output", single characters, or part of a longer
token. Stopping at every token that could complete the string would stop at each token that starts with "t". So the
finder chooses one character of the string as the anchor. Every occurrence of the string has a token that covers the
anchor, and the finder chooses the anchor that costs the fewest requests. The engine stops at each id whose text covers
the anchor. The decoded text then decides: the string is complete; or the text ends with a part of it, and the model
continues one token at a time; or the stop was a false alarm, and the model continues freely.
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
"""Ids that are decoded together to find the end of the vocabulary."""


class StopMatch(Enum):
    """State of a stop string in the text so far."""

    COMPLETE = "complete"
    """The text contains the string."""
    PARTIAL = "partial"
    """The text ends with a part of the string that covers the anchor; the next token may complete it without a stop."""
    NONE = "none"
    """The engine stops again before the string can be complete."""


@frozen(kw_only=True)
class StopFinder:
    """
    A stop string with its anchor for one vocabulary.

    Attributes:
        stop: the string, never empty.
        anchor: index of the character at which the engine stops.
        stop_token_ids: every id whose text covers the anchor in some occurrence of the string.
    """

    stop: str
    anchor: int
    stop_token_ids: tuple[int, ...]

    def match(self, text: str) -> StopMatch:
        """Return the state of the string in the text of a turn so far."""
        if self.stop in text:
            return StopMatch.COMPLETE
        prefixes = (self.stop[:length] for length in range(len(self.stop) - 1, self.anchor, -1))
        return StopMatch.PARTIAL if any(map(text.endswith, prefixes)) else StopMatch.NONE


def build_stop_finder(vocabulary: Iterable[tuple[int, str]], stop: str, sample_ids: Sequence[int] = ()) -> StopFinder:
    """
    Choose the anchor of a stop string for a vocabulary.

    Args:
        vocabulary: every id with its text.
        stop: ASCII, so tokens with incomplete characters cannot contain a part of it.
        sample_ids: ids that a model may write. They affect the number of requests, and never whether the string is
            found.
    """
    texts = dict(vocabulary)
    covering: list[list[int]] = [[] for _ in stop]
    letters = set(stop)
    for token_id, text in texts.items():
        if not letters.isdisjoint(text):
            for anchor in _covered_indices(text, stop):
                covering[anchor].append(token_id)
    finders = [StopFinder(stop=stop, anchor=index, stop_token_ids=tuple(ids)) for index, ids in enumerate(covering)]
    sample = [(token_id, texts[token_id]) for token_id in sample_ids]
    return min(finders, key=lambda finder: (_num_requests(finder, sample), len(finder.stop_token_ids)))


def _num_requests(finder: StopFinder, sample: Iterable[tuple[int, str]]) -> int:
    """Return the number of requests that end within a sample of ids with their texts."""
    stops, num_requests, written, match = frozenset(finder.stop_token_ids), 0, "", StopMatch.NONE
    for token_id, text in sample:
        written += text
        if match is StopMatch.PARTIAL or token_id in stops:
            num_requests += 1
            match = finder.match(written)
        if match is StopMatch.COMPLETE:
            written, match = "", StopMatch.NONE
    return num_requests


def _covered_indices(text: str, stop: str) -> set[int]:
    """Return the indices of the stop string that a token with this text covers in some occurrence of the string."""
    covered: set[int] = set()
    for start in range(1 - len(stop), len(text)):
        first, last = max(0, -start), min(len(stop), len(text) - start)
        if text[start + first : start + last] == stop[first:last]:
            covered.update(range(first, last))
    return covered


def cached_stop_finder(tokenizer: Tokenizer, stop: str, sample: str = "") -> StopFinder:
    """Return the finder of a stop string for a tokenizer, whose vocabulary is read once."""
    key: object = tokenizer  # the protocol does not declare that tokenizers are hashable
    return _cached(key, stop, sample)


@lru_cache(maxsize=4)
def _cached(tokenizer: Any, stop: str, sample: str) -> StopFinder:
    return build_stop_finder(_read_vocabulary(tokenizer), stop, tokenizer.encode(sample))


def _read_vocabulary(tokenizer: Tokenizer) -> Iterator[tuple[int, str]]:
    """Yield every id with its text. The vocabulary ends before the first block of ids without any text."""
    start = 0
    while _decode(tokenizer, range(start, start + _BLOCK)):
        for token_id in range(start, start + _BLOCK):
            yield token_id, _decode(tokenizer, (token_id,))
        start += _BLOCK


def _decode(tokenizer: Tokenizer, token_ids: Sequence[int] | TokenArray) -> str:
    """Return the text of ids, some of which may not exist; slow tokenizers raise for these."""
    try:
        return tokenizer.decode(list(token_ids))
    except (IndexError, KeyError, OverflowError, TypeError, ValueError):
        if len(token_ids) == 1:
            return ""
    return "".join(_decode(tokenizer, (token_id,)) for token_id in token_ids)
