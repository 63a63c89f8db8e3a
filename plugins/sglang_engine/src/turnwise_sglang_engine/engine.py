"""
SGLang as an engine.

SGLang runs in a separate process (`turnwise_sglang_engine.server`), because it changes its process in many ways. Here
requests that would crash it are refused, weight version and sleep are tracked, and no request waits for a dead process.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from itertools import count
from typing import Any, ClassVar, Literal

from turnwise.errors import EngineError, ReplicaDiedError, TornWeightsError
from turnwise.protocols import Resources
from turnwise.protocols.weights import TAGS
from turnwise.types import Capabilities, GenerateRequest, GenerateResult
from turnwise.weights.finishing import finish_in_thread
from turnwise.weights.sleep import SleepState, drops_weights
from turnwise_engine_support.grammars import read_error
from turnwise_engine_support.model_directory import (
    check_model_directory,
    model_spec,
    model_vocab_size,
    read_model_config,
)
from turnwise_engine_support.requests import check_not_in_flight
from turnwise_engine_support.results import RequestCounters
from turnwise_engine_support.weight_checks import ExpectedWeights, expected_weights
from turnwise_moe_routes.shapes import COLUMN, RouteShape, read_shape
from turnwise_sglang_engine import arguments, requests
from turnwise_sglang_engine.config import SglangConfig
from turnwise_sglang_engine.frames import Frame
from turnwise_sglang_engine.nodes import Nodes, find_nodes
from turnwise_sglang_engine.pictures import SentPictures, reads_pictures, weight_names
from turnwise_sglang_engine.process import COMMAND, ServerProcess
from turnwise_sglang_engine.requests import (
    PendingCall,
    check_request,
    empty_result,
    generate_head,
    parse_result,
    sampling_options,
)
from turnwise_sglang_engine.staging import StagedWeights, stage

_ABORT_S = 10.0
"""Seconds that SGLang may take to return the tokens of aborted requests."""


class SglangEngine:
    """
    SGLang, on GPUs or a CPU.

    Args:
        config: the options.
        resources: its `model` is loaded, unless the config names one.
    """

    command: ClassVar[tuple[str, ...]] = COMMAND
    """The command that starts SGLang's process."""

    def __init__(self, config: SglangConfig, resources: Resources) -> None:
        self._config = config
        self._spec = model_spec(config.model, resources)
        self._server: ServerProcess | None = None
        self._nodes = Nodes(config)
        self._unstopped: weakref.finalize[..., Any] | None = None
        self._state = "has not been started"
        self._ready = self._stopping = False
        self._died = self._torn = ""
        self._handles = count()
        self._requests: dict[str, PendingCall] = {}
        self._calls: dict[int, PendingCall] = {}
        self._version = 0
        self._pictures = SentPictures(reads_pictures(config.engine_args, self._spec.path))
        self.sleep_state = SleepState("the sglang engine")
        self._weights_lost = False
        # Sleep, wake-up and update must not overlap: each checks the state that another would change.
        self._switching = asyncio.Lock()
        self._counters = RequestCounters()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            seeds=self._seeds,
            stop_strings=self._config.stop_strings,
            abort=True,
            grammars=self._config.grammars,
            pictures=self._pictures.are_read,
            # SGLang loads tensors only into one copy of the model with one pipeline stage.
            weight_updates=self._config.data_parallel_size == self._config.pipeline_parallel_size == 1,
            sleep_levels=self._sleep_levels,
            max_context=self._max_context,
            vocab_size=self._stated_vocab_size,
            columns=frozenset({COLUMN} if self._config.enable_return_routed_experts else ()),
            **requests.sampling_support(self._config.engine_args),
        )

    @cached_property
    def _routes(self) -> RouteShape | None:
        return read_shape(self._spec.path) if self._config.enable_return_routed_experts else None

    @cached_property
    def _stated_vocab_size(self) -> int | None:
        return model_vocab_size(self._spec.path)

    @property
    def _seeds(self) -> bool:
        return bool(self._config.engine_args.get("enable_deterministic_inference", False))

    @property
    def _sleep_levels(self) -> frozenset[int]:
        if not self._config.sleep_mode or arguments.resolve_device(self._config) == "cpu":
            return frozenset()
        return frozenset({1, 2} if self._config.weights_cpu_backup else {2})

    @cached_property
    def _max_context(self) -> int:
        return arguments.max_context(self._config, self._spec)

    @cached_property
    def _vocab_size(self) -> int:
        return arguments.vocab_size(self._spec)

    @cached_property
    def _expected(self) -> ExpectedWeights:
        tied = bool(read_model_config(self._spec.path).get("tie_word_embeddings", False))
        return expected_weights(check_model_directory(self._spec, "sglang"), tied=tied)

    async def start(self) -> None:
        if self._server is not None or self._stopping:
            raise EngineError(f"the sglang engine {'was stopped' if self._stopping else 'has been started already'}")
        arguments.server_arguments(self._config, self._spec)  # reports a wrong directory before anything is started
        if self.command is COMMAND:
            arguments.check_installed()
        self._server = server = ServerProcess(self._received, self._lost, self.command)
        self._unstopped = weakref.finalize(self, server.kill)
        try:
            self._nodes = await find_nodes(self._config)
            self._config = self._nodes.config
            self._check_sizes(await self._start_servers(server))
        except BaseException as error:
            self._state = "did not start"
            server.kill()
            self._nodes.kill()
            await server.stop()
            if self._stopping:
                raise EngineError("the sglang engine was stopped while it was starting") from error
            raise
        self._ready = True
        self._nodes.watch(self._lost_elsewhere)

    async def _start_servers(self, server: ServerProcess) -> dict[str, Any]:
        """Start the servers of all nodes, and return the first frame of the own one."""
        if self._stopping:
            raise EngineError("the sglang engine was stopped")
        settings, nodes = arguments.server_arguments(self._config, self._spec), self._nodes
        try:
            # Each server waits for the others, so one that fails ends the start of all.
            async with asyncio.TaskGroup() as group:
                own = server.start(nodes.settings(settings, 0), nodes.environment(), self._config.start_timeout_s)
                task = group.create_task(own)
                for other in nodes.starts(settings):
                    group.create_task(other)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return task.result()

    def _lost_elsewhere(self, cause: str) -> None:
        """End this replica when a server of another node has ended: SGLang would wait for it for ever."""
        if self._server is not None and not self._stopping:
            self._die(f"SGLang's process on another node died: {cause}")
            self._server.kill()

    def _check_sizes(self, about: Mapping[str, Any]) -> None:
        num_tokens = about["num_cache_tokens"]
        if num_tokens < self._max_context + arguments.CONTEXT_MARGIN:
            raise EngineError(
                f"the KV cache has {num_tokens} tokens, but max_context needs {self._max_context}:"
                " raise mem_fraction_static or max_total_tokens, or lower max_context"
            )

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """
        Sample a continuation.

        Log-probabilities are of the sampling distribution, after the grammar, temperature, top-k and top-p; for greedy
        they are 0. With both filters SGLang applies top-p to all ids, and not to the ids that top-k leaves.
        """
        server = self._awake_server()
        check_not_in_flight(request, self._requests)
        max_tokens = check_request(
            request,
            max_context=self._max_context,
            vocab_size=self._vocab_size,
            stop_strings=self._config.stop_strings,
            grammars=self._config.grammars,
            reads_pictures=self._pictures.are_read,
        )
        pending = self._requests[request.request_id] = self._register(request)
        options = sampling_options(request.sampling, max_tokens, self._vocab_size, seeds=self._seeds)
        head = generate_head(
            request, pending.handle, options, vocab_size=self._vocab_size, routes=self._routes is not None
        )
        head["pictures"], sent = self._pictures.pack(request.pictures)
        server.send(head, request.token_ids, *sent)
        try:
            frame = await pending.reply
        except asyncio.CancelledError:
            server.send({"op": "cancel", "id": pending.handle})
            raise
        finally:
            del self._requests[request.request_id], self._calls[pending.handle]
        if error := frame.head.get("error"):
            raise read_error(f"request {request.request_id!r} failed: {error}")
        result = empty_result(self._version)
        if frame.arrays:
            result = parse_result(request, frame, version=self._version, routes=self._routes)
        self._counters.count(result)
        return result

    async def abort(self, request_id: str) -> None:
        if self._server is not None and (pending := self._requests.get(request_id)):
            self._server.send({"op": "abort", "id": pending.handle})

    async def sleep(self, level: int) -> None:
        """
        Free the memory of weights and KV cache, after aborting requests in flight.

        Level 1 keeps the weights in host memory. Level 2 frees them, unless `weights_cpu_backup` keeps a copy anyway.
        """
        async with self._switching:
            self._running_server()
            self.sleep_state.check_level(level, self._sleep_levels, "they need a GPU and sleep_mode")
            if not self.sleep_state.awake:
                return
            # Refuses new requests while those in flight are aborted.
            with self.sleep_state.falling_asleep(level):
                await self._abort_all()
                # Before the call, which may free a part of the memory and then fail.
                self.sleep_state.mark_asleep(level)
                self._weights_lost |= drops_weights(level) and not self._config.weights_cpu_backup
                await self._change_memory("sleep", TAGS)

    async def wake_up(self, tags: Iterable[str] = TAGS) -> None:
        async with self._switching:
            self._running_server()
            if wanted := self.sleep_state.tags_to_wake(tags):
                await self._change_memory("wake_up", wanted)
                self.sleep_state.mark_awake(*wanted)

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """
        Replace weights by name, all or none, and drop the KV cache of the old ones.

        All weights are checked and copied to host memory first. Requests in flight wait while SGLang loads them, and
        are then prefilled again from their own tokens. Their results have a version per token.
        """
        async with self._switching:
            self._running_server()
            if not self.capabilities.weight_updates:
                raise EngineError(
                    "SGLang can update weights only if data_parallel_size and pipeline_parallel_size are 1"
                )
            self.sleep_state.check_update()
            whole, names = self._weights_lost or bool(self._torn), weight_names(self._spec.path)
            staging = partial(stage, weights, self._expected, whole=whole, name_for_sglang=names)
            staged = await finish_in_thread(staging, discard=StagedWeights.close)
            try:
                await self._load(staged, version)
            except asyncio.CancelledError:
                # The update continues in SGLang's process, and its result is lost.
                self._torn = "a weight update was cancelled"
                raise
            finally:
                staged.close()
            self._version, self._weights_lost, self._torn = version, False, ""

    async def _load(self, staged: StagedWeights, version: int) -> None:
        buckets = [
            [(entry.name, entry.dtype, entry.shape, entry.offset, entry.num_bytes) for entry in bucket]
            for bucket in staged.buckets(self._bucket_bytes)
        ]
        head = {"op": "update", "path": staged.path, "size": staged.size, "buckets": buckets, "version": version}
        reply = await self._call(head)
        if error := reply.head.get("error"):
            if not reply.head.get("torn"):
                raise EngineError(f"the weights were not loaded: {error}")
            self._torn = f"a weight update failed midway: {error}"
            for pending in self._requests.values():
                pending.fail(TornWeightsError(self._torn))
                if self._server is not None:
                    self._server.send({"op": "cancel", "id": pending.handle})
            raise TornWeightsError(self._torn)

    @property
    def _bucket_bytes(self) -> int:
        """Most bytes of a bucket: a message contains a copy of it for each rank on another node."""
        size, number = self._config.tensor_parallel_size, self._nodes.number
        return max(self._config.weight_bucket_bytes // max(size - size // number, 1), 1)

    def stats(self) -> Mapping[str, float]:
        """Return `num_running`, `num_context_tokens` of these, `weight_version`, and totals."""
        requests = [pending.request for pending in self._requests.values() if pending.request is not None]
        return {**self._counters.stats(requests), "weight_version": self._version}

    async def stop(self) -> None:
        self._stopping, ready, self._ready = True, self._ready, False
        if self._server is None:
            return
        if not ready:
            # A process that is still starting has no state to save.
            self._server.kill()
            self._nodes.kill()
        elif not self._died:
            await self._abort_all()
        if self._unstopped is not None:
            self._unstopped.detach()
        await self._server.stop()
        await self._nodes.stop()

    async def _abort_all(self) -> None:
        """Abort all requests and wait for their tokens; after a timeout they end with none."""
        waiting = [pending for pending in self._calls.values() if pending.request is not None]
        for pending in waiting:
            if self._server is not None:
                self._server.send({"op": "abort", "id": pending.handle})
        if waiting:
            await asyncio.wait([pending.reply for pending in waiting], timeout=_ABORT_S)
        for pending in waiting:
            if not pending.reply.done():
                pending.reply.set_result(Frame({}))

    def _running_server(self) -> ServerProcess:
        """Return the running process, which may be asleep; `ReplicaDiedError` if it has died."""
        if self._died:
            raise ReplicaDiedError(self._died)
        if self._server is None or not self._ready:
            raise EngineError(f"the sglang engine {'was stopped' if self._stopping else self._state}")
        return self._server

    def _awake_server(self) -> ServerProcess:
        """Return the running process; `EngineError` if it cannot serve requests now."""
        server = self._running_server()
        if self._torn:
            raise TornWeightsError(self._torn)
        self.sleep_state.check_serving()
        if self._weights_lost:
            raise EngineError("sleep level 2 freed the weights of the sglang engine: call update_weights")
        return server

    def _register(self, request: GenerateRequest | None = None) -> PendingCall:
        pending = PendingCall(next(self._handles), asyncio.get_running_loop().create_future(), request)
        self._calls[pending.handle] = pending
        return pending

    async def _call(self, head: dict[str, Any]) -> Frame:
        """Send a control call, and return its reply."""
        server = self._running_server()
        pending = self._register()
        server.send({**head, "id": pending.handle})
        try:
            return await pending.reply
        finally:
            del self._calls[pending.handle]

    async def _change_memory(self, op: Literal["sleep", "wake_up"], tags: Iterable[str]) -> None:
        reply = await self._call({"op": op, "tags": sorted(tags)})
        if error := reply.head.get("error"):
            raise EngineError(f"SGLang cannot {op.replace('_', ' ')}: {error}")

    def _received(self, frame: Frame) -> None:
        pending = self._calls.get(frame.head["id"])
        if pending is None or pending.reply.done():
            return
        if frame.head.get("is_part"):
            pending.hear(frame)
        else:
            pending.reply.set_result(frame)

    def _lost(self) -> None:
        """Fail everything that waits for the lost process."""
        if self._stopping or self._server is None:
            self._fail_all(EngineError("the sglang engine was stopped"))
        else:
            self._die(f"SGLang's process died: {self._server.cause()}")

    def _die(self, cause: str) -> None:
        self._died = self._died or cause
        self._nodes.kill()
        self._fail_all(ReplicaDiedError(self._died))

    def _fail_all(self, error: EngineError) -> None:
        for pending in self._calls.values():
            pending.fail(error)
