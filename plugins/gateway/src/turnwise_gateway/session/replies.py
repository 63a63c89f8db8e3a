"""Builds the reply to a call, whole or as far as it is decided."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
from attrs import frozen

from turnwise import GenerateResult
from turnwise_gateway.calls import CallOfTool, ModelReply, Usage
from turnwise_gateway.session.call_ids import NameCall
from turnwise_gateway.session.turns import ReadTurn


@frozen
class ReplyHead:
    """
    The parts of a reply that are known before its turn is sampled.

    Attributes:
        id: of the turn.
        num_prompt_tokens: tokens of the record before the turn.
        provenance: session, record and turn.
        name_call: returns the ids of the turn's calls.
    """

    id: str
    num_prompt_tokens: int
    provenance: Mapping[str, Any]
    name_call: NameCall

    def part(self, reasoning: str, content: str, calls: tuple[CallOfTool, ...] = ()) -> ModelReply:
        """Return the reply of a turn that is being sampled."""
        return ModelReply(
            id=self.id,
            content=content,
            reasoning=reasoning,
            tool_calls=calls,
            usage=Usage(prompt_tokens=self.num_prompt_tokens, completion_tokens=0),
            token_ids=np.empty(0, np.int32),
            logprobs=np.empty(0, np.float32),
            signature=self._sign(reasoning),
            provenance=self.provenance,
        )

    def whole(self, result: GenerateResult, read: ReadTurn, token_texts: tuple[str, ...]) -> ModelReply:
        """Return the reply of a turn."""
        versions = np.atleast_1d(np.asarray(result.weight_version))
        return ModelReply(
            id=self.id,
            content=read.content,
            reasoning=read.reasoning,
            tool_calls=read.tool_calls,
            finish=read.finish,
            stop=read.stop,
            usage=Usage(
                prompt_tokens=self.num_prompt_tokens,
                completion_tokens=len(result.token_ids),
                cached_tokens=result.num_cached_tokens,
                reasoning_tokens=read.num_reasoning_tokens,
            ),
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            token_texts=token_texts,
            signature=self._sign(read.reasoning),
            provenance={**self.provenance, "weight_version": int(versions[-1]) if len(versions) else 0},
        )

    def _sign(self, reasoning: str) -> str:
        return blake2b(f"{self.id}|{reasoning}".encode(), digest_size=16).hexdigest()
