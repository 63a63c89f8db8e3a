"""
SGLang as an engine.

SGLang runs in a process of its own (`turnwise_sglang_engine.server`), because it does as it likes with the one that it
runs in. Here are the promises of an engine: what is refused before SGLang sees it, which weights are served, what
sleeps, and that nobody waits for a process that has gone.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import count
from typing import Any, ClassVar

from attrs import define, field

from turnwise.errors import EngineError, ReplicaDiedError, TornWeightsError
from turnwise.protocols import Resources
from turnwise.types import Capabilities, GenerateRequest, GenerateResult
from turnwise_sglang_engine import arguments
from turnwise_sglang_engine.config import SglangConfig
from turnwise_sglang_engine.frames import Frame
from turnwise_sglang_engine.process import COMMAND, ServerProcess
from turnwise_sglang_engine.requests import drawing, empty_result, num_new_tokens, result_of, sampling_options
from turnwise_sglang_engine.staging import Expected, Staged, checkpoint_shapes, stage

TAGS = frozenset({"weights", "kv_cache"})
"""What can sleep."""
_ABORT_S = 10.0
"""How long SGLang may take to hand back what aborted requests had sampled, before it is stopped."""


@define(eq=False)
class _Pending:
    """A request in flight, or a call, and the future of its answer."""

    handle: int
    answer: asyncio.Future[Frame]
    request: GenerateRequest | None = field(default=None)

    def fail(self, error: Exception) -> None:
        """Let who waits raise."""
        if not self.answer.done():
            self.answer.set_exception(error)
            # An error that nobody fetches, because its waiter was cancelled too, is no news.
            self.answer.exception()


class SglangEngine:
    """
    SGLang, on GPUs or a CPU.

    Args:
        config: its options.
        resources: `model` says which model, unless the config does.
    """

    command: ClassVar[tuple[str, ...]] = COMMAND
    """Starts SGLang's process."""

    def __init__(self, config: SglangConfig, resources: Resources) -> None:
        self._config = config
        self._spec = arguments.model_spec(config, resources)
        self._server: ServerProcess | None = None
        self._unstopped: weakref.finalize[..., Any] | None = None
        self._state = "has not been started"
        self._ready = self._stopping = False
        self._died = self._torn = ""
        self._handles = count()
        self._requests: dict[str, _Pending] = {}
        self._answers: dict[int, _Pending] = {}
        self._version = 0
        self._asleep: set[str] = set()
        self._emptied = False
        self._switching = asyncio.Lock()
        self._totals = {"num_requests": 0, "num_sampled_tokens": 0, "num_cached_tokens": 0}

    @property
    def capabilities(self) -> Capabilities:
        """What the options and the machine allow; see the table in the README."""
        return Capabilities(
            seeds=self._seeds,
            stop_strings=self._config.stop_strings,
            abort=True,
            # SGLang takes tensors with one copy of the model, in one stage, only.
            weight_updates=self._config.data_parallel_size == self._config.pipeline_parallel_size == 1,
            sleep_levels=self._sleep_levels,
            max_context=self._max_context,
        )

    @property
    def _seeds(self) -> bool:
        return bool(self._config.engine_args.get("enable_deterministic_inference", False))

    @cached_property
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
    def _expected(self) -> Expected:
        tied = bool(arguments.model_config(self._spec.path).get("tie_word_embeddings", False))
        return Expected(checkpoint_shapes(arguments.checked_directory(self._spec)), tied=tied)

    async def start(self) -> None:
        """Start SGLang; `EngineError` says in one line what is wrong with model, options, packages or sizes."""
        if self._server is not None or self._stopping:
            raise EngineError(f"the sglang engine {'was stopped' if self._stopping else 'has been started already'}")
        settings = arguments.server_arguments(self._config, self._spec)
        environment = arguments.server_environment(self._config)
        if self.command is COMMAND:
            arguments.check_installed()
        self._server = server = ServerProcess(self._received, self._lost, self.command)
        self._unstopped = weakref.finalize(self, server.kill)
        try:
            about = await server.start(settings, environment, self._config.start_timeout_s)
            self._check_sizes(about)
        except BaseException as error:
            self._state = "did not start"
            server.kill()
            await server.stop()
            if self._stopping:
                raise EngineError("the sglang engine was stopped while it was starting") from error
            raise
        self._ready = True

    def _check_sizes(self, about: Mapping[str, Any]) -> None:
        num_tokens = about["num_cache_tokens"]
        if num_tokens < self._max_context + arguments.CONTEXT_MARGIN:
            raise EngineError(
                f"the cache of {num_tokens} tokens cannot hold max_context, {self._max_context} tokens:"
                " raise mem_fraction_static or max_total_tokens, or lower max_context"
            )

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """
        Sample a continuation.

        The log-probabilities are those of the distribution drawn from: after temperature, top-k and top-p; greedy draws
        from one id, so they are 0. With both filters SGLang's nucleus is that of all ids, before top-k.
        """
        server = self._serving()
        if request.request_id in self._requests:
            raise EngineError(f"request {request.request_id!r} is in flight already")
        sampling = request.sampling
        max_tokens = num_new_tokens(
            request,
            max_context=self._max_context,
            vocab_size=self._vocab_size,
            stop_strings=self._config.stop_strings,
        )
        pending = self._requests[request.request_id] = self._expect(request)
        head = {
            "op": "generate",
            "id": pending.handle,
            "draw": drawing(sampling, self._vocab_size),
            "options": sampling_options(sampling, max_tokens, self._vocab_size, seeds=self._seeds),
        }
        server.send(head, request.token_ids)
        try:
            frame = await pending.answer
        except asyncio.CancelledError:
            server.send({"op": "cancel", "id": pending.handle})
            raise
        finally:
            del self._requests[request.request_id], self._answers[pending.handle]
        if error := frame.head.get("error"):
            raise EngineError(f"request {request.request_id!r} failed: {error}")
        result = result_of(request, frame, version=self._version) if frame.arrays else empty_result(self._version)
        self._count(result)
        return result

    async def abort(self, request_id: str) -> None:
        """End a request with what was sampled; unknown ids are ignored."""
        if self._server is not None and (pending := self._requests.get(request_id)):
            self._server.send({"op": "abort", "id": pending.handle})

    async def sleep(self, level: int) -> None:
        """
        Free the memory of weights and KV cache; requests in flight end first, with `abort`.

        Level 1 keeps the weights in host memory. Level 2 drops them, unless `weights_cpu_backup` keeps them all the
        same.
        """
        async with self._switching:
            self._running()
            if level not in self._sleep_levels:
                known = ", ".join(map(str, sorted(self._sleep_levels))) or "none: they need a GPU and sleep_mode"
                raise EngineError(f"the sglang engine has no sleep level {level}; it has {known}")
            if self._asleep == TAGS:
                return
            self._asleep = set(TAGS)
            await self._abort_all()
            await self._call({"op": "sleep", "tags": sorted(TAGS)})
            self._emptied |= level == 2 and not self._config.weights_cpu_backup

    async def wake_up(self, tags: Iterable[str] = ("weights", "kv_cache")) -> None:
        """Take the memory of these tags again."""
        wanted = set(tags)
        if unknown := sorted(wanted - TAGS):
            raise EngineError(f"cannot wake up {', '.join(unknown)}: what sleeps is {', '.join(sorted(TAGS))}")
        async with self._switching:
            self._running()
            if wanted := wanted & self._asleep:
                await self._call({"op": "wake_up", "tags": sorted(wanted)})
                self._asleep -= wanted

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """
        Replace weights by name, all or none, and drop every key and value of the old ones.

        All are copied to host memory and checked first. Requests in flight wait while they are loaded, and go on from
        their own tokens, read again under the new weights; their results carry a version for each token.
        """
        async with self._switching:
            self._running()
            if not self.capabilities.weight_updates:
                raise EngineError("SGLang takes weights with data_parallel_size and pipeline_parallel_size 1 only")
            if "weights" in self._asleep:
                raise EngineError("the weights are asleep: wake them up before an update")
            whole = self._emptied or bool(self._torn)
            staged = await asyncio.to_thread(stage, weights, self._expected, whole=whole)
            try:
                await self._load(staged, version)
            except asyncio.CancelledError:
                # It goes on in SGLang's process, and nobody will hear how it ended.
                self._torn = "a weight update was cancelled"
                raise
            finally:
                staged.close()
            self._version, self._emptied, self._torn = version, False, ""

    async def _load(self, staged: Staged, version: int) -> None:
        buckets = [
            [(entry.name, entry.dtype, entry.shape, entry.offset, entry.num_bytes) for entry in bucket]
            for bucket in staged.buckets(self._config.weight_bucket_bytes)
        ]
        head = {"op": "update", "path": staged.path, "size": staged.size, "buckets": buckets, "version": version}
        answer = await self._answer_to(head)
        if error := answer.head.get("error"):
            if not answer.head.get("torn"):
                raise EngineError(f"the weights were not loaded: {error}")
            self._torn = f"a weight update failed half-way: {error}"
            for pending in self._requests.values():
                pending.fail(TornWeightsError(self._torn))
                if self._server is not None:
                    self._server.send({"op": "cancel", "id": pending.handle})
            raise TornWeightsError(self._torn)

    def stats(self) -> Mapping[str, float]:
        """Return `num_running`, `num_context_tokens` of these, `weight_version`, and totals since the start."""
        requests = [pending.request for pending in self._requests.values() if pending.request is not None]
        return {
            "num_running": len(requests),
            "num_context_tokens": sum(len(request.token_ids) for request in requests),
            "weight_version": self._version,
            **self._totals,
        }

    async def stop(self) -> None:
        """End requests in flight with `abort`, and SGLang with all its processes. Harmless at any time."""
        self._stopping, ready, self._ready = True, self._ready, False
        if self._server is None:
            return
        if not ready:
            # Nothing of it is worth waiting for.
            self._server.kill()
        elif not self._died:
            await self._abort_all()
        if self._unstopped is not None:
            self._unstopped.detach()
        await self._server.stop()

    async def _abort_all(self) -> None:
        """End what is in flight, and wait for its answers; what does not answer is ended without."""
        waiting = [pending for pending in self._answers.values() if pending.request is not None]
        for pending in waiting:
            if self._server is not None:
                self._server.send({"op": "abort", "id": pending.handle})
        if waiting:
            await asyncio.wait([pending.answer for pending in waiting], timeout=_ABORT_S)
        for pending in waiting:
            if not pending.answer.done():
                pending.answer.set_result(Frame({}))

    def _running(self) -> ServerProcess:
        """Return the process; `EngineError` when there is none, `ReplicaDiedError` when it has gone."""
        if self._died:
            raise ReplicaDiedError(self._died)
        if self._server is None or not self._ready:
            raise EngineError(f"the sglang engine {'was stopped' if self._stopping else self._state}")
        return self._server

    def _serving(self) -> ServerProcess:
        server = self._running()
        if self._torn:
            raise TornWeightsError(self._torn)
        if self._asleep:
            raise EngineError(f"the sglang engine is asleep: wake up {', '.join(sorted(self._asleep))}")
        if self._emptied:
            raise EngineError("the sglang engine dropped its weights when it went asleep: update them first")
        return server

    def _expect(self, request: GenerateRequest | None = None) -> _Pending:
        pending = _Pending(next(self._handles), asyncio.get_running_loop().create_future(), request)
        self._answers[pending.handle] = pending
        return pending

    async def _answer_to(self, head: dict[str, Any]) -> Frame:
        """Return the answer to a call, also to one that does not want to wait any more: its order must be kept."""
        pending = self._expect()
        self._running().send({**head, "id": pending.handle})
        try:
            return await pending.answer
        finally:
            del self._answers[pending.handle]

    async def _call(self, head: dict[str, Any]) -> None:
        answer = await self._answer_to(head)
        if error := answer.head.get("error"):
            raise EngineError(f"SGLang cannot {head['op'].replace('_', ' ')}: {error}")

    def _received(self, frame: Frame) -> None:
        pending = self._answers.get(frame.head["id"])
        if pending is not None and not pending.answer.done():
            pending.answer.set_result(frame)

    def _lost(self) -> None:
        """Let nobody wait for a process that has gone."""
        if self._stopping or self._server is None:
            error: EngineError = EngineError("the sglang engine was stopped")
        else:
            self._died = f"SGLang's process died: {self._server.cause()}"
            error = ReplicaDiedError(self._died)
        for pending in self._answers.values():
            pending.fail(error)

    def _count(self, result: GenerateResult) -> None:
        self._totals["num_requests"] += 1
        self._totals["num_sampled_tokens"] += len(result.token_ids)
        self._totals["num_cached_tokens"] += result.num_cached_tokens
