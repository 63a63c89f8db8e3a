"""The core's `Judge`: a chat template and sampling parameters in front of an engine or a pool of replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from uuid import uuid4

import numpy as np
from attrs import define, field

from turnwise.episode.setup import EngineClient
from turnwise.errors import ConfigError, EngineError, InfrastructureError, ReplicaDiedError
from turnwise.media import is_picture_part
from turnwise.messages import encode_beside_loop
from turnwise.protocols import Chat, PictureChat
from turnwise.record.pictures import Pictures
from turnwise.types import GenerateRequest, GenerateResult, MediaTokens, Message, SamplingParams, TokenArray


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

    async def generate(
        self, token_ids: TokenArray | MediaTokens, sampling: SamplingParams | None = None
    ) -> GenerateResult:
        if self.engine is None:
            raise EngineError("judge: this process has no replicas of it; only workers and reward workers ask it")
        ids, pictures = _split(token_ids)
        if pictures and not self.engine.capabilities.pictures:
            raise ConfigError("judge: its question has pictures, which need an engine with the capability pictures")
        key = uuid4().hex
        sampling = sampling or self.sampling
        if sampling.extra:
            self.engine.capabilities.check_extra(sampling)
        if sampling.seed is None:
            sampling = sampling.with_(seed=self._derive_seed(ids, pictures))
        request = GenerateRequest(
            request_id=key, trajectory_id=key, token_ids=ids, sampling=sampling, pictures=pictures
        )
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
        prompt = await encode_beside_loop(messages, partial(_render, self.chat, messages))
        result = await self.generate(prompt, sampling.with_(stop_token_ids=stops))
        return self.chat.text(result.token_ids)

    def _derive_seed(self, token_ids: TokenArray, pictures: Pictures) -> int:
        # From the question alone: equal questions get equal answers, whichever worker asks and whenever.
        question = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
        question += "".join(each.picture.key for each in pictures).encode()
        salt = (self.seed & (2**64 - 1)).to_bytes(8, "big")
        return int.from_bytes(hashlib.blake2b(question, digest_size=4, salt=salt).digest(), "big") >> 1


def _split(token_ids: TokenArray | MediaTokens) -> tuple[TokenArray, Pictures]:
    if isinstance(token_ids, MediaTokens):
        return token_ids.token_ids, token_ids.pictures
    return token_ids, ()


def _render(chat: Chat, messages: Sequence[Message]) -> TokenArray | MediaTokens:
    """Return the ids of a question; `ConfigError` if it has pictures, and the chat or the model takes none."""
    try:
        if isinstance(chat, PictureChat):
            return chat.picture_prompt(messages)
    except ConfigError as error:
        raise ConfigError(f"judge: {error}") from error
    if any(is_picture_part(part) for message in messages for part in _parts_of(message)):
        raise ConfigError(f"judge.chat: a question has pictures, and the chat {type(chat).__name__} takes none")
    return chat.prompt(messages)


def _parts_of(message: Message) -> Sequence[object]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()
