"""
Grammars of turns: the ids that a grammar allows next, by the package llguidance.

A grammar is compiled once for the engine's tokenizer. Each request has its own state, which moves by one token in each
step. All engines of turnwise mask by it, so one text has the same language everywhere.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import define, evolve, field
from numpy.typing import NDArray

from turnwise.errors import EngineError, GrammarError
from turnwise.types import GenerateRequest
from turnwise_engine_support.diagnosis import installed_version, release
from turnwise_engine_support.error_lines import engine_errors

PACKAGE: Final = "llguidance"
OLDEST: Final = "1.9"
"""Older versions ignore the bounds of a JSON text's white space, which a model may then write forever."""
_MAX_ERROR_CHARS: Final = 500
_NOT_ALLOWED: Final = ("doesn't satisfy the grammar", "parser stopped")
"""In the errors of llguidance for an id that a grammar does not allow; other errors are about the grammar."""
_ENDS, _FAILED, _WRONG = (
    f"the grammar {words}" for words in ("allows no token of the model at this place", "failed:", "cannot be compiled:")
)
_STARTS: Final = (_ENDS, _FAILED, _WRONG)
"""The starts of the texts of all errors that are about a grammar."""
_MAX_KEPT: Final = 128
"""Compiled grammars that wait for their next request; one takes from some kilobytes to some megabytes."""


def supports_grammars(path: Path | None) -> bool:
    """Return whether the package is installed and a model directory has a tokenizer that it can read."""
    return not find_problem(path)


def find_problem(path: Path | None) -> str:
    """Return why the models of a directory cannot have grammars, in one line; empty if they can."""
    _name, found = installed_version(PACKAGE)
    if not found or release(found) < release(OLDEST):
        return f"the package {PACKAGE} {OLDEST} or later is not installed" + (f", found {found}" if found else "")
    if path is None or not (path / "tokenizer.json").exists():
        return "there is no tokenizer.json beside the model"
    return ""


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
        """Return (V,) whether each id may come next; `GrammarError` if none may, or if the grammar is too large."""
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
            raise GrammarError(_ENDS)
        return allowed

    def may_end_with(self, token_id: int) -> bool:
        """Return whether an id ends the turn here."""
        return token_id in self.stop_token_ids and bool(self.matcher.is_accepting())

    def copy(self) -> TurnGrammar:
        return evolve(self, matcher=self.matcher.deep_copy())

    def check(self, token_ids: Sequence[int]) -> None:
        """
        Move by the ids of a whole turn; `EngineError` if the grammar does not allow them.

        The mask is computed for the last id alone: an engine whose mask has failed ends the turn at once, and the
        failure is found again here.
        """
        if token_ids:
            self.read(token_ids[:-1])
            if not self.allowed()[token_ids[-1]]:
                raise EngineError(f"the grammar does not allow the token {token_ids[-1]}")

    def read(self, token_ids: Iterable[int]) -> None:
        """
        Move by some ids.

        Raises:
            GrammarError: the grammar is too large to follow.
            EngineError: the grammar does not allow an id, so the engine did not sample by it.
        """
        for token_id in token_ids:
            if not self.matcher.consume_token(token_id):
                text = _error_of(self.matcher)
                if not any(word in text for word in _NOT_ALLOWED):
                    raise GrammarError(f"{_FAILED} {text}")
                raise EngineError(f"the grammar does not allow the token {token_id}: {text}")

    def _check(self) -> None:
        if self.matcher.is_error():
            raise GrammarError(f"{_FAILED} {_error_of(self.matcher)}")


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
        assert request.grammar is not None
        start = len(request.token_ids) - request.grammar.num_read
        return self.begin(request.grammar.text, request.sampling.stop_token_ids, request.token_ids[start:].tolist())

    def begin(self, text: str, stop_token_ids: Sequence[int], read: Sequence[int]) -> TurnGrammar:
        """
        Return the state of a grammar. Blocks while the grammar is compiled.

        Args:
            text: of the grammar.
            stop_token_ids: ids that end the turn.
            read: ids of the turn so far.

        Raises:
            GrammarError: the grammar cannot be compiled, or is too large.
            EngineError: there are no ids that end the turn, or the grammar does not allow the ids so far.
        """
        if not stop_token_ids:
            raise EngineError("a request with a grammar needs stop_token_ids, or its turn could not end")
        with self._lock:
            matcher = self._find(text).deep_copy()
        state = TurnGrammar(matcher, stop_token_ids, self._tokenizer.eos_tokens, self.vocab_size)
        state.read(read)
        return state

    def _find(self, text: str) -> Any:
        """Return the compiled grammar, which stays at its start."""
        if text not in self._kept:
            from llguidance import LLMatcher

            matcher = LLMatcher(self._tokenizer, text)
            if matcher.is_error():
                raise GrammarError(f"{_WRONG} {_error_of(matcher)}")
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


def read_error(text: str) -> EngineError:
    """Return the error that another process has told as a text; a `GrammarError` if a `TurnGrammar` had raised it."""
    return GrammarError(text) if any(start in text for start in _STARTS) else EngineError(text)


def _error_of(matcher: Any) -> str:
    """Return the error of a matcher in one line, without the state and the grammar behind it."""
    text = matcher.get_error().partition("\n<state>")[0]
    return " ".join(text.split())[:_MAX_ERROR_CHARS]
