"""Tokens of contexts, perhaps with pictures: their comparison, their digest, and the limits that they reach."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from turnwise import Trajectory
from turnwise.errors import BudgetExhausted
from turnwise.protocols import Chat, Episode, PictureChat
from turnwise.record.limit import PICTURES
from turnwise.record.pictures import Pictures, before, places, shifted, split_media
from turnwise.types import MediaTokens, TokenArray
from turnwise_gateway.calls import CallRefusedError
from turnwise_gateway.limits import CallLimits, PictureLimits

Context = TokenArray | MediaTokens


def limit_calls(episode: Episode, chat: Chat, hosts: tuple[str, ...] = ()) -> CallLimits:
    """Return the limits of a session's calls, which take pictures if chat and engine do, and fetch some from hosts."""
    pictures = None
    if episode.capabilities.pictures and isinstance(chat, PictureChat):
        pictures = PictureLimits(chat.check_picture, episode.max_pictures, hosts)
    return CallLimits.of_context(episode.max_tokens, pictures)


def equals_joined(context: Context, record: Trajectory, num_tokens: int, more: Context) -> bool:
    """Return whether a context is the beginning of a record with more behind it."""
    ids, pictures = split_media(context)
    new_ids, new_pictures = split_media(more)
    joined = (*before(record.pictures, num_tokens), *shifted(new_pictures, num_tokens))
    return places(pictures) == places(joined) and np.array_equal(
        ids, np.concatenate([record.input_ids[:num_tokens], new_ids])
    )


def digest(token_ids: TokenArray, pictures: Pictures, size: int) -> str:
    """Return a digest of tokens, `size` bytes as hexadecimal; without pictures, of the ids alone."""
    shown = blake2b(np.asarray(token_ids, "<i4").tobytes(), digest_size=size)
    for place in places(pictures):
        shown.update(repr(place).encode())
    return shown.hexdigest()


def check_pictures(record: Trajectory | None, num_tokens: int, more: Context, most: int) -> None:
    """Refuse more tokens behind the beginning of a record if both have too many pictures together."""
    _ids, pictures = split_media(more)
    held = () if record is None else before(record.pictures, num_tokens)
    if (number := len(held) + len(pictures)) > most and pictures:
        text = f"the conversation has {number} pictures, more than {PICTURES}={most}"
        cause = BudgetExhausted(text, limit=PICTURES, value=most)
        raise CallRefusedError("invalid", text, param="messages") from cause


def context_full(num_tokens: int, max_tokens: int) -> CallRefusedError:
    """Return the refusal of a conversation that is longer than its context."""
    text = f"the conversation has {num_tokens} tokens of at most {max_tokens}"
    return CallRefusedError("context_length_exceeded", text, num_tokens=num_tokens, max_tokens=max_tokens)
