"""
The pictures of a record: their places in its tokens, which no cut divides.

The bytes of a picture are in memory once, see `turnwise.media`. Records, requests and rows hold references.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from attrs import evolve
from numpy.typing import ArrayLike

from turnwise.errors import ConfigError, TrajectoryError
from turnwise.media import MediaTokens, PlacedPicture
from turnwise.types import Capabilities, TokenArray

Pictures = tuple[PlacedPicture, ...]
"""In their order; they do not overlap."""


class IllustratedRecord(Protocol):
    """Tokens and the pictures among them."""

    @property
    def input_ids(self) -> TokenArray: ...

    @property
    def pictures(self) -> Pictures: ...


def split_media(token_ids: ArrayLike | MediaTokens) -> tuple[ArrayLike, Pictures]:
    """Return ids and their pictures."""
    if isinstance(token_ids, MediaTokens):
        return token_ids.token_ids, token_ids.pictures
    return token_ids, ()


def shifted(pictures: Pictures, by: int) -> Pictures:
    """Return the pictures so many tokens later."""
    return tuple(evolve(each, start=each.start + by) for each in pictures) if by else pictures


def before(pictures: Pictures, stop: int) -> Pictures:
    """Return the pictures in the first `stop` tokens; `TrajectoryError` if these end inside of one."""
    kept = tuple(each for each in pictures if each.start < stop)
    if kept and kept[-1].stop > stop:
        raise TrajectoryError(f"a mark at token {stop} divides the picture of tokens {kept[-1].start}:{kept[-1].stop}")
    return kept


def whole_before(pictures: Pictures, stop: int) -> int:
    """Return how many of the first `stop` tokens a cut keeps: it leaves out a picture that does not fit whole."""
    return next((each.start for each in pictures if each.start < stop < each.stop), stop)


def cut_out(record: IllustratedRecord, start: int, stop: int) -> TokenArray | MediaTokens:
    """Return the tokens of a part of a record, with the pictures in it."""
    ids = record.input_ids[start:stop]
    pictures = tuple(each for each in record.pictures if start <= each.start and each.stop <= stop)
    return MediaTokens(token_ids=ids, pictures=shifted(pictures, -start)) if pictures else ids


def first_tokens(prompt: TokenArray | MediaTokens, num_tokens: int) -> TokenArray | MediaTokens:
    """Return at most the first `num_tokens` tokens, without a picture that does not fit whole."""
    if not isinstance(prompt, MediaTokens):
        return prompt[:num_tokens]
    stop = whole_before(prompt.pictures, num_tokens)
    return MediaTokens(token_ids=prompt.token_ids[:stop], pictures=before(prompt.pictures, stop))


def last_tokens(prompt: TokenArray | MediaTokens, num_tokens: int) -> TokenArray | MediaTokens:
    """Return at most the last `num_tokens` tokens, without a picture that does not fit whole."""
    start = len(prompt) - num_tokens
    if not isinstance(prompt, MediaTokens):
        return prompt[start:]
    start = next((each.stop for each in prompt.pictures if each.start < start < each.stop), start)
    kept = tuple(each for each in prompt.pictures if each.start >= start)
    return MediaTokens(token_ids=prompt.token_ids[start:], pictures=shifted(kept, -start))


def read_pictures(given: Sequence[PlacedPicture], token_ids: TokenArray) -> Pictures:
    """Return the pictures of restored tokens; `TrajectoryError` if they do not fit them."""
    if not given:
        return ()
    try:
        return MediaTokens(token_ids=token_ids, pictures=given).pictures
    except (AttributeError, TypeError, ValueError) as error:
        raise TrajectoryError(f"the pictures of a saved trajectory do not fit it: {error}") from error


def take_pictures(record: IllustratedRecord, engine: Capabilities) -> Pictures:
    """Return the pictures of a request; `ConfigError` if the engine takes none."""
    pictures = record.pictures
    if pictures and not engine.pictures:
        raise ConfigError("the messages have pictures, which need an engine with the capability pictures")
    return pictures


def places(pictures: Pictures) -> list[tuple[Any, ...]]:
    """Return (start, number of tokens, key) of each picture, to compare them."""
    return [(each.start, each.num_tokens, each.picture.key) for each in pictures]
