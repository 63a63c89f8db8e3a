"""
A fake engine: deterministic tokens, settable delays and failures, no model.

Its samples depend on the script, or on the seed, the context and the request's seed: never on time, on the order
in which requests arrive or on how many workers send them. Time decides only how far a request had come when it was
aborted or when the weights changed. It imports no tensor library and costs microseconds a call.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from hashlib import blake2b, shake_128
from itertools import accumulate
from typing import Any
from zlib import crc32

import numpy as np
from attrs import define, evolve, field, frozen
from numpy.typing import ArrayLike

from turnwise.errors import EngineError, ReplicaDiedError
from turnwise.protocols.weights import TAGS
from turnwise.types import (
    Capabilities,
    FinishReason,
    FloatArray,
    GenerateRequest,
    GenerateResult,
    TokenArray,
    as_token_array,
)
from turnwise.weights.sleep import SleepState, drops_weights

Outputs = Mapping[tuple[int, ...], ArrayLike] | Callable[[GenerateRequest], ArrayLike]
"""
Tokens to sample: a function of the request, or ids by the end of the context (the longest match wins).

An output that ends before a stop id and before `max_tokens` ends the turn with `stop` and no stop reason.
"""
Latency = float | Callable[[GenerateRequest], float]
TokenLatency = float | Callable[[GenerateRequest, int], float]


class Failure(StrEnum):
    """
    Failures of a call.

    `ERROR` raises `EngineError`; `HANG` waits until it is aborted, cancelled or stopped; the two about
    log-probabilities count them wrongly, which `GenerateResult` refuses with `ValueError`; `DIE` kills the engine: the
    call, all in flight and all later ones raise `ReplicaDiedError`.
    """

    ERROR = "error"
    HANG = "hang"
    TOO_FEW_LOGPROBS = "too_few_logprobs"
    TOO_MANY_LOGPROBS = "too_many_logprobs"
    DIE = "die"


Failures = Mapping[int, Failure] | Callable[[GenerateRequest], Failure | None]
"""Failures by the number of the `generate` call, from 0, or by request."""

_PERIOD = 997
_LOGPROBS: FloatArray = (-(1 + np.arange(16 * _PERIOD) % _PERIOD * 619 % _PERIOD) * 2 / _PERIOD).astype(np.float32)
_LOGPROBS.flags.writeable = False  # results are views of it

SCRIPTED_CAPABILITIES = Capabilities(seeds=True, abort=True, weight_updates=True, sleep_levels=frozenset({1, 2}))


@frozen(kw_only=True)
class RandomPolicy:
    """
    Pseudo-random token ids: a model that depends on (seed, context, request seed) and on nothing else.

    Greedy requests leave the request's seed out.

    Attributes:
        seed: which model.
        vocab_size: ids are in 0..vocab_size-1.
        end_token_id: sampled once, where the model would end its turn; it ends it if it is a stop id.
        mean_tokens: how long turns are on average, geometrically distributed.
    """

    seed: int = 0
    vocab_size: int = 256
    end_token_id: int | None = None
    mean_tokens: float = 32.0

    def sample(self, request: GenerateRequest, num_tokens: int) -> TokenArray:
        """Return (num_tokens,) int32 ids, or fewer that end in the end token when that is a stop id."""
        seed = request.sampling.seed if request.sampling.temperature > 0 else None
        # Little-endian throughout, so that snapshots hold on every machine.
        context = request.token_ids.astype("<i4", copy=False).tobytes()
        key = (self.seed, seed is not None, (seed or 0) % 2**64, len(context), crc32(context))
        digest = struct.pack("<q?QQI", *key)
        end = self._turn_length(blake2b(digest, digest_size=8).digest())
        if self.end_token_id in request.sampling.stop_token_ids:
            num_tokens = min(num_tokens, end)
        words = np.frombuffer(shake_128(digest).digest(4 * num_tokens), "<u4")
        ids = (words % self.vocab_size).astype(np.int32)
        if self.end_token_id is not None and end <= num_tokens:
            ids[end - 1] = self.end_token_id
        return ids

    def _turn_length(self, digest: bytes) -> int:
        uniform = (int.from_bytes(digest, "little") + 1) / 2**64
        if self.mean_tokens <= 1:
            return 1
        return 1 + int(math.log(uniform) / math.log1p(-1 / self.mean_tokens))


@define(eq=False)
class _Running:
    """A request in flight: its start, and the weight versions during it."""

    request: GenerateRequest
    started_s: float
    ended: asyncio.Future[FinishReason | None]
    versions: list[tuple[float, int]] = field(factory=list)


@define(eq=False)
class ScriptedEngine:
    """
    An `Engine` whose answers are known in advance.

    Attributes:
        outputs: tokens to sample; None leaves it to `policy`.
        policy: the pseudo-random model.
        latency_s: seconds before the first token, or a function of the request.
        token_latency_s: seconds for each token, or a function of the request and the token's index.
        failures: failures of calls.
        capabilities: all but stop strings, layouts and pictures, unless given.
        record: keep all requests and calls in `requests` and `calls`; off for long benchmarks.
        requests: every request seen, in order of arrival.
        calls: every other call, such as ``("sleep", 1)`` or ``("update_weights", 3)``.
        num_calls, weight_version: `generate` calls so far, and the version of results.
    """

    outputs: Outputs | None = None
    policy: RandomPolicy = field(factory=RandomPolicy, kw_only=True)
    latency_s: Latency = field(default=0.0, kw_only=True)
    token_latency_s: TokenLatency = field(default=0.0, kw_only=True)
    failures: Failures | None = field(default=None, kw_only=True)
    capabilities: Capabilities = field(kw_only=True)
    record: bool = field(default=True, kw_only=True)
    requests: list[GenerateRequest] = field(factory=list, init=False)
    calls: list[tuple[Any, ...]] = field(factory=list, init=False)
    num_calls: int = field(default=0, init=False)
    weight_version: int = field(default=0, init=False)
    _running: dict[str, _Running] = field(factory=dict, init=False)
    _state: str = field(default="not started", init=False)
    sleep_state: SleepState = field(factory=lambda: SleepState("the scripted engine"), init=False)
    _has_weights: bool = field(default=True, init=False)

    @capabilities.default
    def _default_capabilities(self) -> Capabilities:
        num_ids = max(self.policy.vocab_size, (self.policy.end_token_id or 0) + 1)
        return evolve(SCRIPTED_CAPABILITIES, vocab_size=num_ids if self.outputs is None else None)

    async def start(self) -> None:
        """Get ready, at once; `EngineError` when it was started before."""
        if self._state != "not started":
            raise EngineError(f"cannot start the scripted engine: it is {self._state}")
        self._state = "running"
        self._note("start")

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Answer by the script. Yields to the loop once even with no latency, as every engine does."""
        room = self._admit(request)
        failure = self._failure(request)
        if failure is Failure.DIE:
            self.die()
        if failure in (Failure.ERROR, Failure.DIE):
            raise _dead() if failure is Failure.DIE else EngineError("the scripted engine was told to fail")
        (ids, reason, stop), version = self._sample(request, room), self.weight_version
        schedule = self._schedule(request, len(ids))
        if failure is None and schedule is None:
            if request.on_tokens is not None:  # a listener hears the first half before the end
                request.on_tokens(ids[: len(ids) // 2].tolist())
            await asyncio.sleep(0)
            return self._result(request, ids, (reason, stop), version)
        seconds = schedule[-1] if schedule else 0.0
        running, early = await self._wait(request, math.inf if failure is Failure.HANG else seconds)
        elapsed = asyncio.get_running_loop().time() - running.started_s
        if early is not None:
            ids = ids[: _num_before(elapsed, schedule, len(ids))]
            reason, stop = early, None
        versions = _versions(running.versions, schedule, len(ids))
        return self._result(request, ids, (reason, stop), versions, failure)

    async def abort(self, request_id: str) -> None:
        """End a request early with the tokens that its schedule has sampled; unknown ids are ignored."""
        self._note("abort", request_id)
        if request_id in self._running:
            _end(self._running[request_id], FinishReason.ABORT)

    async def sleep(self, level: int) -> None:
        """End requests in flight with `abort`, refuse others until `wake_up`; `EngineError` for an unknown level."""
        self._note("sleep", level)
        self._require_running()
        self.sleep_state.check_level(level, self.capabilities.sleep_levels)
        for running in self._running.values():
            _end(running, FinishReason.ABORT)
        self.sleep_state.mark_asleep(level)
        self._has_weights &= not drops_weights(level)

    async def wake_up(self, tags: Iterable[str] = TAGS) -> None:
        """Take the memory of these tags again; after level 2 it serves once the weights have been updated."""
        tags = tuple(tags)
        self._note("wake_up", *tags)
        self._require_running()
        self.sleep_state.mark_awake(*self.sleep_state.tags_to_wake(tags))

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Read the weights to their end and answer with `version` from then on, in flight too."""
        self._require_running()
        self.sleep_state.check_update()
        self._note("update_weights", version, *_names_of(weights))
        self._has_weights = True
        self.weight_version = version
        now = asyncio.get_running_loop().time()
        for running in self._running.values():
            running.versions.append((now - running.started_s, version))

    def stats(self) -> Mapping[str, float]:
        """Return `num_running`, `num_context_tokens` of these, and `num_calls`."""
        return {
            "num_running": len(self._running),
            "num_context_tokens": sum(len(running.request.token_ids) for running in self._running.values()),
            "num_calls": self.num_calls,
        }

    async def stop(self) -> None:
        """End requests in flight with `abort`; harmless at any time."""
        self._note("stop")
        self._state = "stopped"
        for running in self._running.values():
            _end(running, FinishReason.ABORT)

    def die(self) -> None:
        """Die as a crashed replica does: all calls, in flight and to come, raise `ReplicaDiedError`."""
        self._state = "dead"
        for running in self._running.values():
            if not running.ended.done():
                running.ended.set_exception(_dead())

    def _note(self, *call: object) -> None:
        if self.record:
            self.calls.append(call)

    def _require_running(self) -> None:
        if self._state != "running":
            raise _dead() if self._state == "dead" else EngineError(f"the scripted engine is {self._state}")

    def _admit(self, request: GenerateRequest) -> int:
        """Return the bound on sampled tokens; `EngineError` for a request that no engine serves."""
        self._require_running()
        self.sleep_state.check_serving()
        if not self._has_weights:
            raise EngineError("the weights were dropped")
        if self.record:
            self.requests.append(request)
        if request.sampling.stop and not self.capabilities.stop_strings:
            raise EngineError("the scripted engine has no stop strings")
        if request.pictures and not self.capabilities.pictures:
            raise EngineError("the scripted engine takes no pictures")
        if request.request_id in self._running:
            raise EngineError(f"request {request.request_id!r} is in flight already")
        return _room(len(request.token_ids), request.sampling.max_tokens, self.capabilities.max_context)

    def _failure(self, request: GenerateRequest) -> Failure | None:
        number, self.num_calls = self.num_calls, self.num_calls + 1
        if self.failures is None:
            return None
        return self.failures.get(number) if isinstance(self.failures, Mapping) else self.failures(request)

    def _sample(self, request: GenerateRequest, room: int) -> tuple[TokenArray, FinishReason, int | None]:
        if self.outputs is None:
            ids = self.policy.sample(request, room)
        else:
            outputs = self.outputs
            ids = as_token_array(_by_ending(outputs, request) if isinstance(outputs, Mapping) else outputs(request))
        return _cut(ids, request.sampling.stop_token_ids, room)

    def _schedule(self, request: GenerateRequest, num_tokens: int) -> Sequence[float] | None:
        """Return (num_tokens,) seconds after which each token is there; None when all are there at once."""
        first, each = self.latency_s, self.token_latency_s
        if not callable(first) and not callable(each) and not first and not each:
            return None
        delays = [each(request, i) if callable(each) else each for i in range(num_tokens)]
        start = first(request) if callable(first) else first
        return [start + passed for passed in accumulate(delays)] or [start]

    async def _wait(self, request: GenerateRequest, seconds: float) -> tuple[_Running, FinishReason | None]:
        """Wait for the end of a request; the reason is set when it came early."""
        loop = asyncio.get_running_loop()
        running = _Running(request, loop.time(), loop.create_future(), [(0.0, self.weight_version)])
        self._running[request.request_id] = running
        # A timer costs less than a timeout, which would cancel the whole chain of callers to tell them the time.
        timer = None if math.isinf(seconds) else loop.call_later(seconds, _end, running, None)
        try:
            return running, await running.ended
        finally:
            del self._running[request.request_id]
            if timer is not None:
                timer.cancel()

    def _result(
        self,
        request: GenerateRequest,
        ids: TokenArray,
        finish: tuple[FinishReason, int | None],
        versions: int | TokenArray,
        failure: Failure | None = None,
    ) -> GenerateResult:
        logprobs = self._logprobs(request, ids, versions)
        if failure is Failure.TOO_FEW_LOGPROBS:
            logprobs = logprobs[:-1]
        elif failure is Failure.TOO_MANY_LOGPROBS:
            logprobs = np.append(logprobs, np.float32(-1))
        return GenerateResult(
            token_ids=ids, logprobs=logprobs, finish_reason=finish[0], stop_reason=finish[1], weight_version=versions
        )

    def _logprobs(self, request: GenerateRequest, ids: TokenArray, versions: int | TokenArray) -> FloatArray:
        """Return (num_tokens,) float32 in [-2, 0), set by place alone: a turn cut in two gets the same ones."""
        start = len(request.token_ids) % _PERIOD
        if start + len(ids) > len(_LOGPROBS):
            return np.resize(_LOGPROBS[start : start + _PERIOD], len(ids))
        return _LOGPROBS[start : start + len(ids)]


def _names_of(weights: Iterable[tuple[str, object]]) -> list[str]:
    try:
        return [name for name, _ in weights]
    except Exception as error:
        raise EngineError(f"cannot update the weights: {error}") from error


def _end(running: _Running, early: FinishReason | None) -> None:
    if not running.ended.done():
        running.ended.set_result(early)


def _dead() -> ReplicaDiedError:
    return ReplicaDiedError("the scripted engine died")


def _by_ending(outputs: Mapping[tuple[int, ...], ArrayLike], request: GenerateRequest) -> ArrayLike:
    context = tuple(request.token_ids.tolist())
    endings = [ending for ending in outputs if context[len(context) - len(ending) :] == ending]
    if not endings:
        raise EngineError(f"the script has no output for a context that ends in {list(context[-8:])}")
    return outputs[max(endings, key=len)]


def _room(num_context: int, max_tokens: int | None, max_context: int | None) -> int:
    if num_context == 0:
        raise EngineError("the context is empty")
    if max_context is not None and num_context >= max_context:
        raise EngineError(f"the context has {num_context} tokens, but max_context is {max_context}")
    bounds = [max_tokens, None if max_context is None else max_context - num_context]
    if known := [bound for bound in bounds if bound is not None]:
        return min(known)
    raise EngineError("the request has no max_tokens")


def _cut(ids: TokenArray, stop_ids: tuple[int, ...], max_tokens: int) -> tuple[TokenArray, FinishReason, int | None]:
    """Return the ids that an engine would sample of these, the finish reason and the stop id."""
    ended_itself = len(ids) < max_tokens
    ids = ids[:max_tokens]
    if stop_ids:
        stops = set(stop_ids)
        for index, token_id in enumerate(ids.tolist()):
            if token_id in stops:
                return ids[: index + 1], FinishReason.STOP, token_id
    return ids, FinishReason.STOP if ended_itself else FinishReason.LENGTH, None


def _num_before(seconds: float, schedule: Sequence[float] | None, num_tokens: int) -> int:
    """Return how many tokens were there after this time; one is always still missing, or it would have ended."""
    if schedule is None:
        return max(num_tokens - 1, 0)
    return sum(at <= seconds for at in schedule[: num_tokens - 1])


def _versions(marks: list[tuple[float, int]], schedule: Sequence[float] | None, num_tokens: int) -> int | TokenArray:
    """Return the version of the weights that each token met, or one for all."""
    if len(marks) == 1 or num_tokens == 0:
        return marks[-1][1]
    times = schedule[:num_tokens] if schedule is not None else [0.0] * num_tokens
    starts = np.array([start for start, _ in marks])
    index = np.searchsorted(starts, np.array(times), side="right") - 1
    met = np.array([version for _, version in marks], np.int32)[index]
    return int(met[0]) if bool((met == met[0]).all()) else met
