"""
A grammar backend of SGLang: the masks of turnwise's own grammars.

SGLang's backend `llguidance` reads JSON schemas and regular expressions, ignores the ids that end the request's turn,
and cannot continue a turn. So this one is registered beside it, by SGLang's `register_grammar_backend`. Only SGLang's
scheduler imports this module.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.constrained.base_grammar_backend import (
    BaseGrammarBackend,
    BaseGrammarObject,
    InvalidGrammarObject,
)

from turnwise.errors import EngineError
from turnwise_engine_support.grammars import GrammarCompiler, TurnGrammar

if TYPE_CHECKING:
    from torch import Tensor

_MAX_KEPT: Final = 128


class RequestGrammar(BaseGrammarObject):  # type: ignore[misc]  # SGLang is not installed for mypy
    """
    The grammar of one request, in SGLang's scheduler.

    A failure must not leave a mask, where it would end the scheduler: it is raised when SGLang reports the sampled id,
    and then it ends this request alone.
    """

    def __init__(self, state: TurnGrammar) -> None:
        super().__init__()
        self._state = state
        self._failure: EngineError | None = None

    def accept_token(self, token: int) -> None:
        if self._failure is not None:
            raise ValueError(str(self._failure))
        if self._state.may_end_with(token):
            self.finished = True
            return
        try:
            self._state.read((token,))
        except EngineError as error:
            raise ValueError(str(error)) from error

    def is_terminated(self) -> bool:
        return bool(self.finished)

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: object) -> Tensor:
        """Return (batch_size, vocab_size) true for each allowed id; rows without a grammar stay as they are."""
        return torch.ones((batch_size, vocab_size), dtype=torch.bool)

    def fill_vocab_mask(self, vocab_mask: Tensor, idx: int) -> None:
        try:
            vocab_mask[idx] = torch.from_numpy(self._state.allowed())
        except EngineError as error:
            self._failure = error

    @staticmethod
    def move_vocab_mask(vocab_mask: Tensor, device: Any) -> Tensor:
        return vocab_mask.to(device, non_blocking=True)

    @staticmethod
    def apply_vocab_mask(logits: Tensor, vocab_mask: Tensor) -> None:
        logits.masked_fill_(~vocab_mask, -torch.inf)

    def copy(self) -> RequestGrammar:
        return RequestGrammar(self._state.copy())


class GrammarBackend(BaseGrammarBackend):  # type: ignore[misc]  # SGLang is not installed for mypy
    """
    Compiles the grammars of requests.

    Args:
        compiler: for the model's tokenizer.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        super().__init__()
        self._compiler = compiler

    def dispatch_ebnf(self, key_string: str) -> BaseGrammarObject:
        """Return the grammar of `grammar_key`'s text, in a thread of SGLang."""
        text, stops, read = json.loads(key_string)
        try:
            return RequestGrammar(self._compiler.begin(text, stops, read))
        except EngineError as error:
            return InvalidGrammarObject(str(error))

    def set_cache(self, key: tuple[str, str], value: BaseGrammarObject) -> None:
        """Keep a grammar for the next requests with its key; at the same moment in all ranks, so all have the same."""
        super().set_cache(key, value)
        while len(self.cache) > _MAX_KEPT:
            del self.cache[next(iter(self.cache))]


def make_backend(server_args: Any, _tokenizer: object, vocab_size: int, _eos_token_ids: object) -> GrammarBackend:
    """Return the backend of a scheduler."""
    return GrammarBackend(GrammarCompiler(Path(server_args.tokenizer_path or server_args.model_path), vocab_size))
