"""
vLLM's `AsyncLLM` as an engine. The model runs in processes of vLLM's own; here is the event loop that talks to them.

Weights change between two steps: generation is paused with the requests in flight kept, every key and value is dropped,
the workers load the new weights, and the requests are read again from their own tokens. vLLM notes for each token under
which weights it was sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

import structlog

from turnwise.errors import EngineError, ReplicaDiedError, TornWeightsError
from turnwise.protocols import Resources
from turnwise.types import Capabilities, GenerateRequest, GenerateResult
from turnwise_vllm_engine.config import VllmConfig
from turnwise_vllm_engine.host_memory import resident_bytes
from turnwise_vllm_engine.requests import as_prompt, num_new_tokens, result_of, sampling_options
from turnwise_vllm_engine.starting import (
    Start,
    Started,
    first_line,
    has_tokenizer,
    installed,
    model_limit,
    model_spec,
    start,
)
from turnwise_vllm_engine.weights import Expected, Staged, checkpoint_shapes, stage

TAGS = ("weights", "kv_cache")
"""What can be woken by itself."""

_STOP_S = 10.0
"""How long requests in flight get to hand back what they had when the engine is stopped."""


class VllmEngine:
    """
    Any model that vLLM serves, on GPUs or on a CPU.

    Args:
        config: its options.
        resources: `model` says which model, unless the config does.
        starter: starts vLLM's processes.
        device: that vLLM is built for; None looks which build is installed.
    """

    def __init__(
        self, config: VllmConfig, resources: Resources, starter: Start = start, device: str | None = None
    ) -> None:
        self._config = config
        self._device = installed()[1] if device is None else device
        self._spec = model_spec(config, resources)
        self._starter = starter
        self._running: Started | None = None
        self._called_start = False
        self._ended = ""
        self._died = ""
        self._torn = ""
        self._expected = Expected({})
        self._pending: dict[str, GenerateRequest] = {}
        self._idle = asyncio.Event()
        self._updating = asyncio.Lock()
        self._asleep: frozenset[str] = frozenset()
        self._weights_lost = False
        self._version = 0
        self._workers: list[tuple[int, int]] = []
        self._totals = {"num_requests": 0, "num_sampled_tokens": 0, "num_cached_tokens": 0}

    @cached_property
    def capabilities(self) -> Capabilities:
        """Sleep levels need `sleep_mode`; stop strings need the model's tokenizer."""
        return Capabilities(
            seeds=True,
            abort=True,
            stop_strings=self._has_stop_strings,
            weight_updates=True,
            sleep_levels=frozenset({1, 2}) if self._config.sleep_mode else frozenset(),
            max_context=self._max_context,
        )

    @cached_property
    def _max_context(self) -> int:
        limit = model_limit(self._spec.path)
        return self._config.max_context if limit is None else min(self._config.max_context, limit)

    @cached_property
    def _has_stop_strings(self) -> bool:
        wanted = self._config.stop_strings
        return has_tokenizer(self._spec.path) if wanted is None else wanted

    async def start(self) -> None:
        """Start vLLM; `EngineError` says in one line what is wrong with the model, the packages or the sizes."""
        if self._called_start or self._ended:
            raise EngineError(f"the vllm engine {self._ended or 'has been started already'}")
        self._called_start = True
        running = await asyncio.to_thread(
            self._starter, self._config, self._spec, self._max_context, self._has_stop_strings
        )
        try:
            # What vLLM asks its processes at the first request it then knows: a request is there at once or never.
            await running.llm.get_supported_tasks()
            self._expected = await self._describe(running)
            await running.llm.update_weight_version("0")
        except BaseException:
            await asyncio.to_thread(running.llm.shutdown)
            raise
        if self._ended:
            await asyncio.to_thread(running.llm.shutdown)
            raise EngineError(f"the vllm engine {self._ended} while it was starting")
        self._running = running
        await self._measure(running)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """
        Sample a continuation. The log-probabilities are those of the distribution drawn from: after temperature, top-k
        and top-p; greedy draws from one id, so they are 0.
        """
        running = self._serving()
        max_tokens = self._admit(request, running)
        self._pending[request.request_id] = request
        self._idle.clear()
        try:
            output = await self._last_output(running, request, max_tokens)
        except running.deaths as error:
            raise self._death(error) from error
        except running.refusals as error:
            raise EngineError(f"request {request.request_id!r} was refused: {first_line(error)}") from error
        finally:
            del self._pending[request.request_id]
            if not self._pending:
                self._idle.set()
        if self._torn:
            raise TornWeightsError(self._torn)
        result = result_of(request, output, version=self._version)
        self._count(result)
        return result

    async def abort(self, request_id: str) -> None:
        """End a request with the tokens that have come back; unknown ids are ignored."""
        if self._running is not None and request_id in self._pending:
            await self._end([request_id], self._running)

    async def sleep(self, level: int) -> None:
        """
        Free the device's memory: level 1 keeps the weights in host memory, level 2 drops them.

        On a CPU, which is host memory, level 1 frees the KV cache alone. Requests in flight end with `abort`.
        `EngineError` for a level that there is not.
        """
        levels = self.capabilities.sleep_levels
        if level not in levels:
            known = ", ".join(map(str, sorted(levels)))
            why = f"only {known}" if levels else "sleep_mode is off"
            raise EngineError(f"the vllm engine cannot sleep at level {level}: {why}")
        async with self._updating:
            running = self._alive()
            if "weights" not in self._asleep:
                asleep, self._asleep = self._asleep, frozenset(TAGS)
                await self._end(list(self._pending), running)
                await self._suspend(running, level, half_awake=bool(asleep))
                self._weights_lost = self._weights_lost or level == 2
                await self._measure(running)
            elif level == 2 and not self._weights_lost:
                raise EngineError("the vllm engine is asleep at level 1: wake its weights up before level 2")

    async def wake_up(self, tags: Iterable[str] = TAGS) -> None:
        """Take the memory of these tags again; `EngineError` for one that there is not. Idempotent."""
        wanted = frozenset(tags)
        if unknown := sorted(wanted.difference(TAGS)):
            raise EngineError(f"the vllm engine has no tag {unknown[0]!r} to wake up, only {' and '.join(TAGS)}")
        async with self._updating:
            running = self._alive()
            # In this order: weights in place before the cache takes what is left.
            for tag in TAGS:
                if tag in wanted & self._asleep:
                    await self._resume(running, tag)
                    self._asleep -= {tag}
            await self._measure(running)

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """
        Replace weights by name, all or none, and drop every key and value of the old ones.

        They are checked and written down while generation goes on. Requests in flight are then read again under the
        new weights; their results carry a version for each token. `EngineError` for a name or shape that the model has
        not, or part of a layer that vLLM fuses: nothing was changed. `TornWeightsError` when vLLM failed half-way.
        """
        async with self._updating:
            running = self._alive()
            if "weights" in self._asleep:
                raise EngineError("the vllm engine's weights are asleep: wake them up before an update")
            staged = await asyncio.to_thread(
                stage,
                weights,
                self._expected,
                weight_dir=self._config.weight_dir,
                bucket_bytes=self._config.weight_bucket_bytes,
                whole=self._weights_lost or bool(self._torn),
            )
            try:
                await self._swap(running, staged, version)
            finally:
                await asyncio.to_thread(staged.remove)
            await self._measure(running)

    def stats(self) -> Mapping[str, float]:
        """
        Return `num_running`, `num_context_tokens` of these, `weight_version`, `memory_bytes`, and totals of all time.

        `memory_bytes` is of all workers together: the resident memory of their processes on a CPU; on a GPU what is in
        use there, by whomever, as of the last start, sleep, waking up or update.
        """
        return {
            "num_running": len(self._pending),
            "num_context_tokens": sum(len(request.token_ids) for request in self._pending.values()),
            "weight_version": self._version,
            "memory_bytes": self._memory_bytes,
            **self._totals,
        }

    async def stop(self) -> None:
        """End requests in flight with `abort`, and vLLM's processes. Harmless at any time."""
        self._ended = self._ended or "was stopped"
        running, self._running = self._running, None
        if running is None:
            return
        await self._end(list(self._pending), running)
        if self._pending:
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await self._idle.wait()
        await asyncio.to_thread(running.llm.shutdown)

    def _alive(self) -> Started:
        """Return the running engine, asleep or not."""
        if self._running is None:
            raise EngineError(f"the vllm engine {self._ended or 'has not been started'}")
        if self._died:
            raise ReplicaDiedError(self._died)
        return self._running

    def _serving(self) -> Started:
        """Return the running engine; `EngineError` when it can sample nothing."""
        running = self._alive()
        if self._torn:
            raise TornWeightsError(self._torn)
        if self._asleep:
            raise EngineError(f"the vllm engine is asleep: wake up {' and '.join(sorted(self._asleep))}")
        if self._weights_lost:
            raise EngineError("the vllm engine's weights were dropped by sleep level 2: update_weights brings new ones")
        return running

    def _admit(self, request: GenerateRequest, running: Started) -> int:
        if request.request_id in self._pending:
            raise EngineError(f"request {request.request_id!r} is in flight already")
        return num_new_tokens(
            request,
            max_context=self._max_context,
            vocab_size=running.vocab_size,
            stop_strings=self._has_stop_strings,
        )

    async def _last_output(self, running: Started, request: GenerateRequest, max_tokens: int) -> Any:
        params = running.sampling_params(**sampling_options(request.sampling, max_tokens))
        answer = running.llm.generate(as_prompt(request.token_ids), params, request.request_id)
        if not (outputs := [output async for output in answer]):
            raise self._death(None)
        return outputs[-1]

    async def _end(self, request_ids: list[str], running: Started) -> None:
        """Let requests answer with what has come back: vLLM does that on this side, without its processes."""
        with suppress(*running.deaths):
            await running.llm.abort(request_ids)

    async def _suspend(self, running: Started, level: int, *, half_awake: bool) -> None:
        """Free memory. On a CPU vLLM stands still, and the workers do it: its own sleep frees nothing there."""
        llm = running.llm
        if self._device == "cpu":
            await llm.pause_generation(mode="abort", clear_cache=True)
            await llm.collective_rpc("turnwise_drop", args=(level,))
            return
        if half_awake:
            # vLLM sleeps as a whole: what is left of the last sleep is woken first.
            await llm.wake_up(None)
        await llm.sleep(level)

    async def _resume(self, running: Started, tag: str) -> None:
        """Take the memory of a tag again; vLLM goes on when nothing sleeps any more."""
        if self._device != "cpu":
            await running.llm.wake_up([tag])
            return
        await running.llm.collective_rpc("turnwise_take", args=(tag,))
        if self._asleep == {tag}:
            await running.llm.resume_generation()

    @property
    def _memory_bytes(self) -> int:
        if self._device == "cpu":
            return sum(resident_bytes(pid) for pid, _ in self._workers)
        return sum(num_bytes for _, num_bytes in self._workers)

    async def _measure(self, running: Started) -> None:
        """Ask the workers what their devices hold; whether they live is for other calls to find out."""
        if self._device != "cpu" or not self._workers:
            with suppress(*running.deaths):
                self._workers = list(map(tuple, await running.llm.collective_rpc("turnwise_memory")))

    def _death(self, error: Exception | None) -> ReplicaDiedError:
        if not self._died:
            self._died = "vLLM's processes have ended" + (f": {first_line(error)}" if error is not None else "")
        return ReplicaDiedError(self._died)

    async def _describe(self, running: Started) -> Expected:
        described, *_ = await running.llm.collective_rpc("turnwise_describe")
        shapes = await asyncio.to_thread(checkpoint_shapes, self._spec.path) if self._spec.path is not None else {}
        return Expected(shapes, fused=described["fused"], tied=described["tied"])

    async def _swap(self, running: Started, staged: Staged, version: int) -> None:
        """Load what was staged between two steps. From here on a failure, or a cancelled call, leaves torn weights."""
        llm, paused = running.llm, not self._asleep
        try:
            if paused and not self._torn:
                await llm.pause_generation(mode="keep", clear_cache=True)
            if staged.paths:
                await llm.collective_rpc("turnwise_load", args=([str(path) for path in staged.paths],))
            await llm.update_weight_version(str(version))
            if paused:
                await llm.resume_generation()
        except running.deaths as error:
            raise self._death(error) from error
        except BaseException as error:
            self._torn = f"the weight update to version {version} failed half-way: {first_line(error)}"
            structlog.get_logger().error("weights torn", engine="vllm", version=version, reason=first_line(error))
            # Generation stays paused. What waits for it goes on elsewhere, with the tokens of the old weights.
            await self._end(list(self._pending), running)
            if isinstance(error, Exception):
                raise TornWeightsError(self._torn) from error
            raise
        self._version, self._torn, self._weights_lost = version, "", False

    def _count(self, result: GenerateResult) -> None:
        self._totals["num_requests"] += 1
        self._totals["num_sampled_tokens"] += len(result.token_ids)
        self._totals["num_cached_tokens"] += result.num_cached_tokens
