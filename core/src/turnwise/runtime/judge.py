"""The core's `Judge`: a chat template and sampling parameters in front of an engine or a pool of replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from uuid import uuid4

import numpy as np
from attrs import define, field

from turnwise.episode.setup import EngineClient
from turnwise.errors import ConfigError, EngineError, InfrastructureError, ReplicaDiedError
from turnwise.protocols import Chat
from turnwise.types import GenerateRequest, GenerateResult, Message, SamplingParams, TokenArray


@define(eq=False)
class JudgeClient:
    """
    Sends requests to a judge.

    Attributes:
        engine: replicas of the judge; one engine in the local runtime; None in a process that sends no requests.
        release: called with the id of a finished request, so that replicas free its context.
    """

    engine: EngineClient | None
    chat: Chat | None = None
    sampling: SamplingParams = field(factory=lambda: SamplingParams(temperature=0.0, max_tokens=1024))
    seed: int = 0
    release: Callable[[str], None] | None = None

    async def generate(self, token_ids: TokenArray, sampling: SamplingParams | None = None) -> GenerateResult:
        if self.engine is None:
            raise EngineError("judge: this process has no replicas of it; only workers and reward workers ask it")
        key = uuid4().hex
        sampling = sampling or self.sampling
        if sampling.extra:
            self.engine.capabilities.check_extra(sampling)
        if sampling.seed is None:
            sampling = sampling.with_(seed=self._derive_seed(token_ids))
        request = GenerateRequest(request_id=key, trajectory_id=key, token_ids=token_ids, sampling=sampling)
        try:
            return await self.engine.generate(request)
        # A lost judge is a failure of the infrastructure, and not of the engine that the episode samples from.
        except ReplicaDiedError as error:
            raise InfrastructureError(f"judge: {error}") from error
        except EngineError as error:
            raise EngineError(f"judge: {error}") from error
        finally:
            if self.release is not None:
                self.release(key)

    async def ask(self, messages: Sequence[Message], sampling: SamplingParams | None = None) -> str:
        if self.chat is None:
            raise ConfigError("judge.model.path: asking a judge in words needs the directory of its model")
        sampling = sampling or self.sampling
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *self.chat.stop_token_ids)))
        result = await self.generate(self.chat.prompt(messages), sampling.with_(stop_token_ids=stops))
        return self.chat.text(result.token_ids)

    def _derive_seed(self, token_ids: TokenArray) -> int:
        # From the question alone: equal questions get equal answers, whichever worker asks and whenever.
        question = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
        salt = (self.seed & (2**64 - 1)).to_bytes(8, "big")
        return int.from_bytes(hashlib.blake2b(question, digest_size=4, salt=salt).digest(), "big") >> 1
