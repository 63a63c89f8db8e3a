"""The core's `turnwise.judge.Judge`: a chat template and sampling parameters in front of an engine, or of many."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NoReturn
from uuid import uuid4

import numpy as np
from attrs import define, field

from turnwise.episode_setup import EngineClient
from turnwise.errors import ConfigError, EngineError, InfrastructureError, ReplicaDiedError
from turnwise.protocols import Chat
from turnwise.types import Capabilities, GenerateRequest, GenerateResult, Message, SamplingParams, TokenArray


@define(eq=False)
class JudgeClient:
    """
    Asks the replicas of a judge.

    Attributes:
        engine: the replicas; one engine in the local runtime.
        chat: the judge's own chat template, when its model has a directory.
        sampling: how its tokens are drawn unless said otherwise.
        seed: of the run.
        release: tells the replicas that a request has ended, so that its context is not kept.
    """

    engine: EngineClient
    chat: Chat | None = None
    sampling: SamplingParams = field(factory=lambda: SamplingParams(temperature=0.0, max_tokens=1024))
    seed: int = 0
    release: Callable[[str], None] = field(default=lambda _key: None)

    async def generate(self, token_ids: TokenArray, sampling: SamplingParams | None = None) -> GenerateResult:
        """Continue a context; see `turnwise.judge.Judge`."""
        key = uuid4().hex
        sampling = sampling or self.sampling
        if sampling.seed is None:
            sampling = sampling.with_(seed=self._seed_of(token_ids))
        request = GenerateRequest(request_id=key, trajectory_id=key, token_ids=token_ids, sampling=sampling)
        try:
            return await self.engine.generate(request)
        except ReplicaDiedError as error:
            raise InfrastructureError(f"judge: {error}") from error
        except EngineError as error:
            raise EngineError(f"judge: {error}") from error
        finally:
            self.release(key)

    async def ask(self, messages: Sequence[Message], sampling: SamplingParams | None = None) -> str:
        """Return the text of an answer; see `turnwise.judge.Judge`."""
        if self.chat is None:
            raise ConfigError("judge.model.path: asking a judge in words needs the directory of its model")
        sampling = sampling or self.sampling
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *self.chat.stop_token_ids)))
        result = await self.generate(self.chat.prompt(messages), sampling.with_(stop_token_ids=stops))
        return self.chat.text(result.token_ids)

    def _seed_of(self, token_ids: TokenArray) -> int:
        """Derive a seed from what is asked, never from when or where."""
        asked = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
        return int.from_bytes(hashlib.blake2b(asked, digest_size=4, salt=self._salt).digest(), "big") >> 1

    @property
    def _salt(self) -> bytes:
        return (self.seed & (2**64 - 1)).to_bytes(8, "big")


class JudgeElsewhere:
    """The engine of a judge in a process that only builds parts and never asks: the driver of a Ray run."""

    capabilities = Capabilities()

    async def generate(self, request: GenerateRequest) -> NoReturn:
        """Refuse."""
        raise EngineError("this process has no replicas of the judge: only workers and reward workers ask it")

    async def abort(self, request_id: str) -> None:
        """Do nothing."""
