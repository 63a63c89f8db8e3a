"""
A logits processor of vLLM: the masks of turnwise's own grammars.

vLLM imports this module by name in its workers and calls the processor before temperature, top-k and top-p. vLLM's own
structured outputs ignore the ids that end the request's turn, and cannot continue a turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import define
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from turnwise.errors import EngineError
from turnwise_engine_support.grammars import GrammarCompiler, TurnGrammar
from turnwise_vllm_engine.requests import GRAMMAR_ARGUMENT

if TYPE_CHECKING:
    from torch import Tensor


@define(eq=False)
class _Row:
    """
    The grammar of a request in vLLM's batch.

    Attributes:
        state: behind the first `num_read` sampled ids.
        sampled: all sampled ids; vLLM appends to it.
        num_read: of them.
        has_ended: the turn has its last id; vLLM may sample once more before it sees that.
    """

    state: TurnGrammar
    sampled: Sequence[int]
    num_read: int = 0
    has_ended: bool = False

    def mask(self, logits: Tensor) -> None:
        """
        Exclude ids from (V,) logits, in place.

        An error here would end vLLM. So if the grammar has failed, the turn ends at once, and the engine, which checks
        the last id of each turn under a grammar, finds the error again.
        """
        try:
            self._read()
            allowed = torch.from_numpy(self.state.allowed()).to(logits.device)
        except EngineError:
            self.has_ended = True
        if self.has_ended:
            allowed = torch.zeros(len(logits), dtype=torch.bool)
            allowed[self.state.stop_token_ids[0]] = True
        logits.masked_fill_(~allowed.to(logits.device), -torch.inf)

    def _read(self) -> None:
        while self.num_read < len(self.sampled) and not self.has_ended:
            token_id = self.sampled[self.num_read]
            if self.state.may_end_with(token_id):
                self.has_ended = True
            else:
                self.state.read((token_id,))
            self.num_read += 1


class GrammarProcessor(LogitsProcessor):  # type: ignore[misc]  # vLLM is not installed for mypy
    """Masks the rows of requests with a grammar."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        model = vllm_config.model_config
        self._compiler = GrammarCompiler(Path(model.tokenizer or model.model), model.get_vocab_size())
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: object) -> None:
        process_dict_updates(self._rows, batch_update, self._begin)

    def apply(self, logits: Tensor) -> Tensor:
        for index, row in self._rows.items():
            row.mask(logits[index])
        return logits

    def _begin(self, params: Any, prompt: Sequence[int] | None, sampled: Sequence[int]) -> _Row | None:
        """Return the grammar of a request that enters the batch, also again, after its keys and values were freed."""
        asked: Mapping[str, Any] | None = (params.extra_args or {}).get(GRAMMAR_ARGUMENT)
        if asked is None:
            return None
        prompt = prompt or ()
        # The engine has compiled the same text behind the same ids, so this raises nothing.
        state = self._compiler.begin(asked["text"], asked["stops"], list(prompt[len(prompt) - asked["num_read"] :]))
        return _Row(state, sampled)
