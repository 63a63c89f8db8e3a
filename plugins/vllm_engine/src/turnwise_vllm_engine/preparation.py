"""Prepares requests for vLLM: compiles their grammars, and reads their pictures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from turnwise.errors import DataError, EngineError
from turnwise.types import GenerateRequest, GenerateResult, PlacedPicture
from turnwise_engine_support.grammars import GrammarCompiler, TurnGrammar
from turnwise_engine_support.picture_families import PictureArrays
from turnwise_engine_support.pictures import PictureReader
from turnwise_vllm_engine.requests import as_prompt

PicturePrompt = Callable[[list[int], Sequence[PlacedPicture], Sequence[PictureArrays]], Mapping[str, Any]]
"""The type of `turnwise_vllm_engine.pictures.picture_prompt`, which tests replace with a fake that needs no vLLM."""


@frozen(eq=False)
class Prepared:
    """
    A request that vLLM can have.

    Attributes:
        prompt: vLLM's rendered input.
        grammar: the state of its grammar at its start; None if it has none.
    """

    prompt: Mapping[str, Any]
    grammar: TurnGrammar | None = None

    async def check(self, result: GenerateResult) -> None:
        """Raise `EngineError` if a turn does not keep to its grammar, or the grammar has failed at its last id."""
        if self.grammar is not None:
            await asyncio.to_thread(self.grammar.check, result.token_ids.tolist())


@define(eq=False)
class Preparation:
    """
    Prepares requests: a wrong grammar or a wrong number of placeholders would end vLLM's process.

    Attributes:
        compiler: of grammars, for the model's tokenizer; None without the option `grammars`.
        reader: of pictures, for the model's processor; None if the model reads none.
        picture_prompt: makes vLLM's input.
    """

    compiler: GrammarCompiler | None
    reader: PictureReader | None
    picture_prompt: PicturePrompt
    _preparing: set[str] = field(factory=set, init=False)

    async def prepare(self, request: GenerateRequest) -> Prepared | None:
        """
        Return a prepared request; None if it was aborted meanwhile. One without grammar and pictures takes no time.

        Raises:
            EngineError: the grammar cannot be compiled, or does not allow the start of the turn; a picture is broken,
                or does not fit its placeholders.
        """
        if request.grammar is None and not request.pictures:
            return Prepared(as_prompt(request.token_ids))
        self._preparing.add(request.request_id)
        try:
            grammar = None
            if self.compiler is not None and request.grammar is not None:
                grammar = await asyncio.to_thread(self.compiler.start, request)
            prompt = await asyncio.to_thread(self._make_prompt, request)
            return Prepared(prompt, grammar) if request.request_id in self._preparing else None
        finally:
            self._preparing.discard(request.request_id)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests that vLLM does not have yet."""
        self._preparing.difference_update(request_ids)

    def _make_prompt(self, request: GenerateRequest) -> Mapping[str, Any]:
        if not request.pictures or self.reader is None:
            return as_prompt(request.token_ids)
        try:
            arrays = self.reader.read(request.token_ids, request.pictures)
        except DataError as error:
            raise EngineError(f"request {request.request_id!r}: {error}") from error
        return self.picture_prompt(request.token_ids.tolist(), request.pictures, arrays)
