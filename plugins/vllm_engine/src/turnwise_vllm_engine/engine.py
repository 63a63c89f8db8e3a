"""
vLLM's `AsyncLLM` as an engine. The model runs in vLLM's processes; the event loop that talks to them runs here.

Weights change between two steps: generation pauses and keeps the requests in flight, the KV cache is dropped, the
workers load the new weights, and the requests are prefilled again from their own tokens. vLLM records the weight
version of each token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import structlog

from turnwise.errors import EngineError, ReplicaDiedError, TornWeightsError
from turnwise.protocols import Resources
from turnwise.protocols.weights import TAGS, MemoryTag
from turnwise.types import Capabilities, GenerateRequest, GenerateResult
from turnwise.weights.finishing import finish_in_thread
from turnwise.weights.sleep import SleepState, drops_weights
from turnwise_engine_support.error_lines import error_line
from turnwise_engine_support.grammars import GrammarCompiler
from turnwise_engine_support.model_directory import model_limit, model_spec, model_vocab_size
from turnwise_engine_support.requests import check_not_in_flight
from turnwise_engine_support.results import RequestCounters
from turnwise_engine_support.weight_checks import ExpectedWeights, expected_weights
from turnwise_moe_routes.shapes import COLUMN, RouteShape, read_shape
from turnwise_vllm_engine import copies
from turnwise_vllm_engine.config import VllmConfig
from turnwise_vllm_engine.host_memory import resident_bytes
from turnwise_vllm_engine.launch import Launcher, RunningVllm, has_tokenizer, installed_build, launch
from turnwise_vllm_engine.pictures import make_reader, reads_pictures
from turnwise_vllm_engine.preparation import Preparation, Prepared
from turnwise_vllm_engine.requests import (
    SAMPLING_OPTIONS,
    check_request,
    empty_result,
    parse_result,
    sampling_options,
)
from turnwise_vllm_engine.weights import StagedWeights, stage

_STOP_S = 10.0
"""Seconds that requests in flight have to return their tokens when the engine is stopped."""


class VllmEngine:
    """
    Any model that vLLM serves, on GPUs or on a CPU.

    Args:
        config: the options.
        resources: its `model` is loaded, unless the config names one.
        launcher: starts vLLM's processes.
        device: `cpu` or `cuda`, the device that vLLM is built for; None asks the installed build.
    """

    def __init__(
        self, config: VllmConfig, resources: Resources, launcher: Launcher = launch, device: str | None = None
    ) -> None:
        self._config = config
        self._device = installed_build()[1] if device is None else device
        self._spec = model_spec(config.model, resources)
        self._launcher = launcher
        self._running: RunningVllm | None = None
        self._preparation: Preparation | None = None
        self._called_start = False
        self._ended = ""
        self._died = ""
        self._torn = ""
        self._expected = ExpectedWeights({})
        self._holders: dict[int, str] = {}
        self._pending: dict[str, GenerateRequest] = {}
        self._idle = asyncio.Event()
        # Sleep, wake-up and update pause and resume vLLM, so only one of them runs at a time.
        self._updating = asyncio.Lock()
        self.sleep_state = SleepState("the vllm engine")
        self._weights_lost = False
        self._version = 0
        self._workers: list[tuple[int, int]] = []
        self._counters = RequestCounters()

    @cached_property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            seeds=True,
            abort=True,
            grammars=self._config.grammars,
            pictures=reads_pictures(self._config, self._spec.path),
            stop_strings=self._has_stop_strings,
            weight_updates=True,
            sleep_levels=frozenset({1, 2}) if self._config.sleep_mode else frozenset(),
            max_context=self._max_context,
            vocab_size=model_vocab_size(self._spec.path),
            sampling_options=SAMPLING_OPTIONS,
            columns=frozenset({COLUMN} if self._config.enable_return_routed_experts else ()),
        )

    @cached_property
    def _max_context(self) -> int:
        limit = model_limit(self._spec.path)
        return self._config.max_context if limit is None else min(self._config.max_context, limit)

    @cached_property
    def _has_stop_strings(self) -> bool:
        wanted = self._config.stop_strings
        return has_tokenizer(self._spec.path) if wanted is None else wanted

    @cached_property
    def _routes(self) -> RouteShape | None:
        return read_shape(self._spec.path) if self._config.enable_return_routed_experts else None

    async def start(self) -> None:
        if self._called_start or self._ended:
            raise EngineError(f"the vllm engine {self._ended or 'has been started already'}")
        self._called_start = True
        reader = await asyncio.to_thread(make_reader, self._config, self._spec.path)
        running = await asyncio.to_thread(
            self._launcher, self._config, self._spec, self._max_context, self._has_stop_strings
        )
        try:
            # vLLM asks its processes for this before the first request. Asked now, that request needs no round trip,
            # and an abort cannot arrive before it.
            await running.llm.get_supported_tasks()
            self._expected = await self._expected_weights(running)
            await running.llm.update_weight_version("0")
        except BaseException:
            await asyncio.to_thread(running.llm.shutdown)
            raise
        if self._ended:
            await asyncio.to_thread(running.llm.shutdown)
            raise EngineError(f"the vllm engine {self._ended} while it was starting")
        self._preparation = Preparation(None, reader, running.picture_prompt)
        if self._config.grammars and self._spec.path is not None:
            self._preparation.compiler = GrammarCompiler(self._spec.path, running.vocab_size)
        self._running = running
        await self._measure(running)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """
        Sample a continuation.

        Log-probabilities are of the sampling distribution, after the grammar, temperature, top-k and top-p; for greedy
        they are 0.
        """
        running = self._awake_vllm()
        max_tokens = self._check_request(request, running)
        self._pending[request.request_id] = request
        self._idle.clear()
        try:
            result = await self._sample(running, request, max_tokens)
        except running.deaths as error:
            raise self._death(error) from error
        except running.refusals as error:
            raise EngineError(f"request {request.request_id!r} was refused: {error_line(error)}") from error
        finally:
            del self._pending[request.request_id]
            if not self._pending:
                self._idle.set()
        self._counters.count(result)
        return result

    async def abort(self, request_id: str) -> None:
        if self._running is not None and request_id in self._pending:
            await self._abort([request_id], self._running)

    async def sleep(self, level: int) -> None:
        """
        Free device memory: level 1 keeps the weights in host memory, level 2 frees them.

        On a CPU the weights are in host memory already, so level 1 frees only the KV cache.
        """
        self.sleep_state.check_level(level, self.capabilities.sleep_levels, "sleep_mode is off")
        async with self._updating:
            running = self._running_vllm()
            if awake := self.sleep_state.awake:
                # Refuses new requests while those in flight are aborted.
                with self.sleep_state.falling_asleep(level):
                    await self._abort(list(self._pending), running)
                    # Before the call, which may free a part of the memory and then fail.
                    self.sleep_state.mark_asleep(level)
                    self._weights_lost = self._weights_lost or drops_weights(level)
                    await self._free(running, level, half_awake=len(awake) < len(TAGS))
                await self._measure(running)
            elif drops_weights(level) and not self._weights_lost:
                raise EngineError("the vllm engine is asleep at level 1: wake up its weights before level 2")

    async def wake_up(self, tags: Iterable[str] = TAGS) -> None:
        async with self._updating:
            running = self._running_vllm()
            for tag in self.sleep_state.tags_to_wake(tags):
                await self._restore(running, tag)
                self.sleep_state.mark_awake(tag)
            await self._measure(running)

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """
        Replace weights by name, all or none, and drop the KV cache of the old ones.

        Generation continues while the weights are checked and written to files. Requests in flight are then prefilled
        again under the new weights, and their results have a version per token.

        Raises:
            EngineError: nothing was changed: a wrong name or shape, or only a part of the weights that vLLM fuses into
                one layer.
            TornWeightsError: vLLM failed while it loaded the weights.
        """
        async with self._updating:
            running = self._running_vllm()
            self.sleep_state.check_update()
            staging = partial(
                stage,
                weights,
                self._expected,
                weight_dir=self._config.weight_dir,
                bucket_bytes=self._config.weight_bucket_bytes,
                whole=self._weights_lost or bool(self._torn),
            )
            staged = await finish_in_thread(staging, discard=StagedWeights.close)
            try:
                paths = await self._copy(running, staged)
                await self._swap(running, staged, paths, version)
            finally:
                await asyncio.to_thread(staged.close)
                if self._holders:
                    with suppress(*running.deaths):
                        await running.llm.collective_rpc("turnwise_drop_copies")
            await self._measure(running)

    def stats(self) -> Mapping[str, float]:
        """
        Return `num_running`, `num_context_tokens` of these, `weight_version`, `memory_bytes`, and totals.

        `memory_bytes` is the sum over all workers. On a CPU it is their resident memory now. On a GPU it is the memory
        in use by all processes, as of the last start, sleep, wake-up or update.
        """
        return {
            **self._counters.stats(self._pending.values()),
            "weight_version": self._version,
            "memory_bytes": self._memory_bytes,
        }

    async def stop(self) -> None:
        # A start that is still running sees this, and shuts down what it has started.
        self._ended = self._ended or "was stopped"
        running, self._running = self._running, None
        if running is None:
            return
        await self._abort(list(self._pending), running)
        if self._pending:
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await self._idle.wait()
        await asyncio.to_thread(running.llm.shutdown)

    def _running_vllm(self) -> RunningVllm:
        """Return the running vLLM, which may be asleep."""
        if self._running is None:
            raise EngineError(f"the vllm engine {self._ended or 'has not been started'}")
        if self._died:
            raise ReplicaDiedError(self._died)
        return self._running

    def _awake_vllm(self) -> RunningVllm:
        """Return the running vLLM; `EngineError` if it cannot serve requests now."""
        running = self._running_vllm()
        if self._torn:
            raise TornWeightsError(self._torn)
        self.sleep_state.check_serving()
        if self._weights_lost:
            raise EngineError("sleep level 2 freed the weights of the vllm engine: call update_weights")
        return running

    def _check_request(self, request: GenerateRequest, running: RunningVllm) -> int:
        check_not_in_flight(request, self._pending)
        return check_request(
            request,
            max_context=self._max_context,
            vocab_size=running.vocab_size,
            stop_strings=self._has_stop_strings,
            grammars=self._config.grammars,
            reads_pictures=self.capabilities.pictures,
        )

    async def _sample(self, running: RunningVllm, request: GenerateRequest, max_tokens: int) -> GenerateResult:
        assert self._preparation is not None
        prepared = await self._preparation.prepare(request)
        self._awake_vllm()
        if prepared is None:
            return empty_result(self._version)
        output = await self._last_output(running, request, prepared, max_tokens)
        if self._torn:
            # A failed update ended this request early.
            raise TornWeightsError(self._torn)
        result = parse_result(request, output, version=self._version, routes=self._routes)
        await prepared.check(result)
        return result

    async def _last_output(
        self, running: RunningVllm, request: GenerateRequest, prepared: Prepared, max_tokens: int
    ) -> Any:
        listener = request.on_tokens
        params = running.sampling_params(streams=listener is not None, **sampling_options(request, max_tokens))
        last, num_heard = None, 0
        async for last in running.llm.generate(prepared.prompt, params, request.request_id):
            if listener is not None and (new := list(last.outputs[0].token_ids[num_heard:])):
                num_heard += len(new)
                listener(new)
        if last is None:
            raise self._death(None)
        return last

    async def _abort(self, request_ids: list[str], running: RunningVllm) -> None:
        """End requests with the tokens received so far. vLLM does so in this process, even if its own have ended."""
        if self._preparation is not None:
            self._preparation.abort(request_ids)
        with suppress(*running.deaths):
            await running.llm.abort(request_ids)

    async def _free(self, running: RunningVllm, level: int, *, half_awake: bool) -> None:
        """Free memory. On a CPU vLLM's own sleep frees nothing, so it is paused and the workers free the memory."""
        llm = running.llm
        if self._device == "cpu":
            await llm.pause_generation(mode="abort", clear_cache=True)
            await llm.collective_rpc("turnwise_free", args=(level,))
            return
        if half_awake:
            # vLLM can only sleep as a whole, so the part that is still asleep wakes up first.
            await llm.wake_up(None)
        await llm.sleep(level)

    async def _restore(self, running: RunningVllm, tag: MemoryTag) -> None:
        """Restore the memory of a tag; vLLM resumes when all tags are awake."""
        if self._device != "cpu":
            await running.llm.wake_up([tag])
            return
        await running.llm.collective_rpc("turnwise_restore", args=(tag,))
        if self.sleep_state.awake | {tag} == set(TAGS):
            await running.llm.resume_generation()

    @property
    def _memory_bytes(self) -> int:
        if self._device == "cpu":
            return sum(resident_bytes(pid) for pid, _ in self._workers)
        return sum(num_bytes for _, num_bytes in self._workers)

    async def _measure(self, running: RunningVllm) -> None:
        """Ask the workers for their memory. Dead workers are ignored here: the next request reports them."""
        if self._device != "cpu" or not self._workers:
            with suppress(*running.deaths):
                self._workers = list(map(tuple, await running.llm.collective_rpc("turnwise_memory")))

    def _death(self, error: Exception | None) -> ReplicaDiedError:
        if not self._died:
            self._died = "vLLM's processes have ended" + (f": {error_line(error)}" if error is not None else "")
        return ReplicaDiedError(self._died)

    async def _expected_weights(self, running: RunningVllm) -> ExpectedWeights:
        workers = await running.llm.collective_rpc("turnwise_describe")
        self._holders = copies.choose_holders([each["machine"] for each in workers], copies.machine_id())
        described = workers[0]
        fused, tied = described["fused"], described["tied"]
        return await asyncio.to_thread(expected_weights, self._spec.path, fused=fused, tied=tied)

    async def _copy(self, running: RunningVllm, staged: StagedWeights) -> copies.Paths:
        """Copy staged weights to the machines of workers that cannot open the files here. Changes no weights."""
        try:
            return await copies.copy_files(staged.places, self._holders, running.llm.collective_rpc)
        except running.deaths as error:
            raise self._death(error) from error
        except Exception as error:
            raise EngineError(f"cannot copy the new weights to other machines: {error_line(error)}") from error

    async def _swap(self, running: RunningVllm, staged: StagedWeights, paths: copies.Paths, version: int) -> None:
        """Load staged weights between two steps. A failure or a cancellation from here on leaves torn weights."""
        llm, paused = running.llm, self.sleep_state.level == 0
        try:
            if paused and not self._torn:
                await llm.pause_generation(mode="keep", clear_cache=True)
            if staged.places:
                await llm.collective_rpc("turnwise_load", args=(staged.places, paths))
            await llm.update_weight_version(str(version))
            if paused:
                await llm.resume_generation()
        except running.deaths as error:
            raise self._death(error) from error
        except BaseException as error:
            self._torn = f"the weight update to version {version} failed midway: {error_line(error)}"
            structlog.get_logger().error("weights torn", engine="vllm", version=version, reason=error_line(error))
            # Generation stays paused, so requests in flight return their tokens of the old weights and continue on
            # another replica.
            await self._abort(list(self._pending), running)
            if isinstance(error, Exception):
                raise TornWeightsError(self._torn) from error
            raise
        self._version, self._torn, self._weights_lost = version, "", False
