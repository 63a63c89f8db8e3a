"""The grammars of requests in the process of the engine, which checks them before and after vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from attrs import define, field

from turnwise.types import GenerateRequest, GenerateResult
from turnwise_engine_support.grammars import GrammarCompiler, TurnGrammar


@define(eq=False)
class RequestGrammars:
    """
    Compiles the grammars of requests: a wrong one would end vLLM's process.

    Attributes:
        compiler: for the model's tokenizer.
    """

    compiler: GrammarCompiler
    _starting: set[str] = field(factory=set, init=False)

    async def start(self, request: GenerateRequest) -> TurnGrammar | None:
        """
        Return the state of a request's grammar at its start; None if the request was aborted meanwhile.

        Raises:
            EngineError: the grammar cannot be compiled, or does not allow the start of the turn.
        """
        self._starting.add(request.request_id)
        try:
            state = await asyncio.to_thread(self.compiler.start, request)
            return state if request.request_id in self._starting else None
        finally:
            self._starting.discard(request.request_id)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests that vLLM does not have yet."""
        self._starting.difference_update(request_ids)


async def check_turn(state: TurnGrammar, result: GenerateResult) -> None:
    """Raise `EngineError` if a turn does not keep to its grammar, or the grammar has failed at its last id."""
    await asyncio.to_thread(state.check, result.token_ids.tolist())
