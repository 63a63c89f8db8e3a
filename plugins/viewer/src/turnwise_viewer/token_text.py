"""The text of each token of a record, from the tokenizer of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np
from attrs import frozen

from turnwise import load_config
from turnwise.errors import TurnwiseError, first_line
from turnwise.types import JsonDict, TokenArray
from turnwise_chat_templates import load_chat

_CONFIG_FILES: Final = ("config.resolved.yaml", "config.yaml")
"""Of a rollout, and of a training."""
_UNKNOWN: Final = "\N{REPLACEMENT CHARACTER}"
_MOST_JOINED: Final = 16
"""Most tokens that are decoded together to find one character; longer runs of bytes are no text."""

Decode = Callable[[TokenArray], str]


@frozen
class TokenLimits:
    """
    Limits of the config of a run; None where it sets none, or where there is no config.

    Attributes:
        response: most response tokens of a record.
        turn: most tokens of a turn.
        validation_turn: the same in validation.
    """

    response: int | None = None
    turn: int | None = None
    validation_turn: int | None = None

    def describe(self, *, validation: bool) -> JsonDict:
        """Return the limits of an episode as the API has them."""
        return {"response_budget": self.response, "turn_limit": self.validation_turn if validation else self.turn}


def find_limits(folder: Path) -> TokenLimits:
    """Return the limits of tokens in the config of a run."""
    try:
        file = _find_config(folder)
        if file is None:
            return TokenLimits()
        rollout = load_config(file).rollout
    except (TurnwiseError, OSError):
        return TokenLimits()  # of another version; episodes are shown without limits
    return TokenLimits(rollout.response_length, rollout.sampling.max_tokens, rollout.validation_sampling.max_tokens)


def _find_config(folder: Path) -> Path | None:
    return next((folder / name for name in _CONFIG_FILES if (folder / name).exists()), None)


def find_decoder(folder: Path) -> tuple[Decode | None, str]:
    """Return the decoder of a run's tokenizer, or None and the reason why there is none."""
    try:
        file = _find_config(folder)
        if file is None:
            return None, f"{folder} has no config of a run"
        model = load_config(file).model_spec()
        if model.path is None:
            return None, "the config of the run names no model"
        return load_chat(model).tokenizer.decode, ""
    except (TurnwiseError, OSError) as error:
        return None, f"the tokenizer of the run cannot be loaded: {first_line(error)}"


class TokenTexts:
    """The text of single tokens; each id is decoded once."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}

    def pieces(self, token_ids: TokenArray) -> list[str]:
        """
        Return the text of each token.

        A character whose bytes are in several tokens is the text of its last token, and the others have none.
        """
        for token in dict.fromkeys(token_ids.tolist()):
            if token not in self._known:
                self._known[token] = self._decode(np.array([token], np.int32))
        texts = [self._known[token] for token in token_ids.tolist()]
        for start, stop in _runs_of_parts(texts):
            texts[start:stop] = self._joined(token_ids[start:stop], texts[start:stop])
        return texts

    def _joined(self, token_ids: TokenArray, texts: list[str]) -> list[str]:
        """Return the texts of tokens that are parts of characters: decode growing runs until one is whole."""
        start = 0
        while start < len(texts):
            for stop in range(start + 1, min(start + _MOST_JOINED, len(texts)) + 1):
                whole = self._decode(token_ids[start:stop])
                if _UNKNOWN not in whole:
                    texts[start:stop] = [""] * (stop - start - 1) + [whole]
                    break
            else:
                stop = start + 1
            start = stop
        return texts


def _runs_of_parts(texts: list[str]) -> Iterator[tuple[int, int]]:
    at = 0
    for is_part, run in groupby(texts, key=lambda text: _UNKNOWN in text):
        length = len(list(run))
        if is_part:
            yield at, at + length
        at += length
