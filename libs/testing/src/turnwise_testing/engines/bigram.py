"""
A fake engine with real weights: one numpy matrix, whose row i has the logits after id i.

Everything that engines do with weights can be watched on it in microseconds: updates in mid-flight, sleep, a second
model to compare with. It needs no tensor library.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from turnwise.errors import EngineError
from turnwise.protocols.weights import TAGS
from turnwise.types import Capabilities, FinishReason, FloatArray, GenerateRequest, GenerateResult
from turnwise.weights.finishing import finish_in_thread
from turnwise.weights.sleep import SleepState, drops_weights
from turnwise.weights.sources import as_numpy

NAME = "bigram.weight"


def bigram_weights(vocab_size: int, seed: int = 0) -> NDArray[np.float32]:
    """Return a (vocab_size, vocab_size) matrix of random logits."""
    return np.random.default_rng(seed).standard_normal((vocab_size, vocab_size)).astype(np.float32) * 4


def log_softmax(logits: NDArray[np.float32], temperature: float) -> FloatArray:
    """Return log-probabilities along the last axis; temperature 0 gives the values of temperature 1."""
    scaled = logits.astype(np.float64) / (temperature or 1.0)
    scaled -= scaled.max(axis=-1, keepdims=True)
    logprobs: FloatArray = (scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))).astype(np.float32)
    return logprobs


@define(eq=False)
class BigramReference:
    """The truth of a `BigramEngine`: a `turnwise_testing.probes.engine.Reference`."""

    vocab_size: int = 64

    def weights(self, *, variant: int) -> Iterable[tuple[str, Any]]:
        """Return the matrix that engines start with, or another."""
        return [(NAME, bigram_weights(self.vocab_size, seed=variant))]

    def scores(
        self, token_ids: Sequence[int], num_context: int, *, temperature: float, variant: int
    ) -> tuple[FloatArray, FloatArray]:
        """Return the log-probability of each id after the context, and of the best id in its place."""
        ids = np.array(token_ids)
        logprobs = log_softmax(bigram_weights(self.vocab_size, variant)[ids[num_context - 1 : -1]], temperature)
        return np.take_along_axis(logprobs, ids[num_context:, None], 1)[:, 0], logprobs.max(axis=1)


@define(eq=False)
class BigramEngine:
    """
    An `Engine` that samples from one matrix.

    Attributes:
        vocab_size: rows and columns.
        token_latency_s: seconds for each token.
        max_context: most tokens of context and output together.
    """

    vocab_size: int = 64
    token_latency_s: float = 0.0005
    max_context: int = 256
    _weights: Any = field(default=None, init=False)
    _version: int = field(default=0, init=False)
    _state: str = field(default="not started", init=False)
    sleep_state: SleepState = field(factory=lambda: SleepState("the bigram engine"), init=False)
    _running: dict[str, bool] = field(factory=dict, init=False)

    @property
    def capabilities(self) -> Capabilities:
        """All but stop strings and layouts."""
        return Capabilities(
            seeds=True,
            abort=True,
            weight_updates=True,
            sleep_levels=frozenset({1, 2}),
            max_context=self.max_context,
            vocab_size=self.vocab_size,
        )

    async def start(self) -> None:
        """Make the first weights."""
        self._weights, self._state = bigram_weights(self.vocab_size), "running"

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample token by token from whatever weights are there at the time."""
        room = self._room(request)
        key, ids, logprobs, versions = request.request_id, request.token_ids.tolist(), [], []
        num_context, stops = len(ids), set(request.sampling.stop_token_ids)
        random = np.random.default_rng([request.sampling.seed or 0, num_context])
        self._running[key] = False
        try:
            while len(ids) < num_context + room and ids[num_context:][-1:] not in [[stop] for stop in stops]:
                await asyncio.sleep(self.token_latency_s)
                if self._running[key]:
                    break
                token, logprob = self._draw(ids[-1], request.sampling.temperature, random)
                ids.append(token)
                logprobs.append(logprob)
                versions.append(self._version)
        finally:
            aborted = self._running.pop(key)
        return self._result(ids[num_context:], (logprobs, versions), stops, aborted=aborted)

    async def abort(self, request_id: str) -> None:
        """End a request before its next token; unknown ids are ignored."""
        if request_id in self._running:
            self._running[request_id] = True

    async def sleep(self, level: int) -> None:
        """End requests in flight; level 2 also frees the weights."""
        self._require_running()
        self.sleep_state.check_level(level, self.capabilities.sleep_levels)
        self.sleep_state.mark_asleep(level)
        await self._end_all()
        if drops_weights(level):
            self._weights = None

    async def wake_up(self, tags: Iterable[str] = TAGS) -> None:
        """Take memory again."""
        self._require_running()
        self.sleep_state.mark_awake(*self.sleep_state.tags_to_wake(tags))

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Replace the matrix if the update has exactly one matrix of its shape."""
        self._require_running()
        self.sleep_state.check_update()
        try:
            staged = await finish_in_thread(lambda: [(name, np.array(as_numpy(array))) for name, array in weights])
        except Exception as error:
            raise EngineError(f"cannot update the weights: {error}") from error
        for name, array in staged:
            if name != NAME or array.shape != (self.vocab_size, self.vocab_size):
                raise EngineError(f"the bigram engine has no weight {name!r} of shape {array.shape}")
        if staged:
            self._weights = staged[-1][1]
        self._version = version

    def stats(self) -> Mapping[str, float]:
        """Return `num_running` and `memory_bytes`."""
        there = self._weights is not None and "weights" in self.sleep_state.awake
        return {"num_running": len(self._running), "memory_bytes": self._weights.nbytes if there else 0}

    async def stop(self) -> None:
        """End requests in flight; harmless at any time."""
        self._state = "stopped"
        await self._end_all()

    async def _end_all(self) -> None:
        while self._running:
            for key in self._running:
                self._running[key] = True
            await asyncio.sleep(self.token_latency_s)

    def _require_running(self) -> None:
        if self._state != "running":
            raise EngineError(f"the bigram engine is {self._state}")

    def _room(self, request: GenerateRequest) -> int:
        self._require_running()
        self.sleep_state.check_serving()
        if self._weights is None:
            raise EngineError("the bigram engine has no weights: sleep level 2 dropped them")
        num_context = len(request.token_ids)
        if not 0 < num_context < self.max_context:
            raise EngineError(f"a context of {num_context} tokens does not fit max_context={self.max_context}")
        return min(request.sampling.max_tokens or self.max_context, self.max_context - num_context)

    def _draw(self, last: int, temperature: float, random: np.random.Generator) -> tuple[int, float]:
        logprobs = log_softmax(self._weights[last], temperature)
        if temperature == 0:
            return int(logprobs.argmax()), 0.0
        shares = np.exp(logprobs.astype(np.float64))
        token = int(random.choice(self.vocab_size, p=shares / shares.sum()))
        return token, float(min(logprobs[token], 0.0))

    def _result(
        self, ids: list[int], drawn: tuple[list[float], list[int]], stops: set[int], *, aborted: bool
    ) -> GenerateResult:
        stopped = bool(ids) and ids[-1] in stops
        ended = FinishReason.ABORT if aborted else FinishReason.STOP if stopped else FinishReason.LENGTH
        versions = np.array(drawn[1] or [self._version], np.int32)
        return GenerateResult(
            token_ids=ids,
            logprobs=drawn[0],
            finish_reason=ended,
            stop_reason=ids[-1] if stopped and not aborted else None,
            weight_version=int(versions[0]) if (versions == versions[0]).all() else versions,
        )
