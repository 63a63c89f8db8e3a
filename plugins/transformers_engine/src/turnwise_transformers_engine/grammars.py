"""
Grammars of turns: the ids that a grammar allows next, by the package llguidance.

A grammar is compiled once for the engine's tokenizer. Each request has its own state, which its decoder's thread moves
by one token in each step.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from turnwise.errors import EngineError
from turnwise.types import GenerateRequest
from turnwise_engine_support.error_lines import engine_errors

PACKAGE: Final = "llguidance"
_MAX_KEPT: Final = 128
"""Compiled grammars that wait for their next request; one takes from some kilobytes to some megabytes."""


def supports_grammars(path: Path | None) -> bool:
    """Return whether the package is installed and a model directory has a tokenizer that it can read."""
    return path is not None and (path / "tokenizer.json").exists() and find_spec(PACKAGE) is not None


@define(eq=False)
class TurnGrammar:
    """
    The state of a grammar in one turn. It belongs to one thread at a time.

    Attributes:
        matcher: of llguidance.
        stop_token_ids: ids that end the turn; they are allowed exactly where the text may end.
        end_ids: ids that llguidance takes for the end of a text.
        vocab_size: V, of the model.
    """

    matcher: Any
    stop_token_ids: Sequence[int]
    end_ids: Sequence[int]
    vocab_size: int

    def allowed(self) -> NDArray[np.bool_]:
        """Return (V,) whether each id may come next; `EngineError` if none may, or if the grammar is too large."""
        matcher = self.matcher
        if matcher.is_stopped():  # also after an error
            self._check()
            allowed = np.zeros(self.vocab_size, np.bool_)
        else:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            self._check()
            allowed = np.unpackbits(bits, bitorder="little", count=self.vocab_size).astype(np.bool_)
            allowed[list(self.end_ids)] = False
        # After the mask: a stop id may be one that the grammar has as text too.
        allowed[list(self.stop_token_ids)] = matcher.is_accepting()
        if not allowed.any():
            raise EngineError("a grammar allows no token of the model at this place")
        return allowed

    def read(self, token_ids: Iterable[int]) -> None:
        """Move by some ids; `EngineError` if the grammar does not allow them."""
        for token_id in token_ids:
            if not self.matcher.consume_token(token_id):
                raise EngineError(f"the grammar does not allow the token {token_id}: {self.matcher.get_error()}")

    def _check(self) -> None:
        if self.matcher.is_error():
            raise EngineError(f"the grammar failed: {self.matcher.get_error()}")


@define(eq=False)
class GrammarCompiler:
    """
    Compiles grammars for the tokenizer of a model, each once. Any thread may call it.

    Attributes:
        path: model directory.
        vocab_size: V, of the model, which may be more than the tokenizer has.
    """

    path: Path
    vocab_size: int
    _kept: OrderedDict[str, Any] = field(factory=OrderedDict, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def start(self, request: GenerateRequest) -> TurnGrammar:
        """Return the state of a request's grammar behind its context. Blocks while the grammar is compiled."""
        grammar, stops = request.grammar, request.sampling.stop_token_ids
        assert grammar is not None
        if not stops:
            raise EngineError("a request with a grammar needs stop_token_ids, or its turn could not end")
        with self._lock:
            matcher = self._find(grammar.text).deep_copy()
        state = TurnGrammar(matcher, stops, self._tokenizer.eos_tokens, self.vocab_size)
        state.read(request.token_ids[len(request.token_ids) - grammar.num_read :].tolist())
        return state

    def _find(self, text: str) -> Any:
        """Return the compiled grammar, which stays at its start."""
        if text not in self._kept:
            from llguidance import LLMatcher

            matcher = LLMatcher(self._tokenizer, text)
            if matcher.is_error():
                raise EngineError(f"the grammar cannot be compiled: {matcher.get_error()}")
            self._kept[text] = matcher
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(text)
        return self._kept[text]

    @cached_property
    def _tokenizer(self) -> Any:
        with engine_errors(f"cannot read the tokenizer of {str(self.path)!r} for grammars"):
            from llguidance.hf import from_tokenizer
            from transformers import AutoTokenizer

            tokenizer: Any = AutoTokenizer.from_pretrained(self.path, local_files_only=True)
            return from_tokenizer(tokenizer, n_vocab=self.vocab_size)


def exclude_ids(logits: Any, states: Mapping[int, TurnGrammar]) -> dict[int, EngineError]:
    """
    Set the logits of ids that grammars exclude to -inf, in place.

    Args:
        logits: (B, V).
        states: of some rows, by their index.

    Returns:
        The errors of rows whose grammar has failed, by index; their logits stay as they are.
    """
    import torch

    failed: dict[int, EngineError] = {}
    for index, state in states.items():
        try:
            allowed = state.allowed()
        except EngineError as error:
            failed[index] = error
        else:
            logits[index].masked_fill_(~torch.from_numpy(allowed).to(logits.device), -torch.inf)
    return failed
