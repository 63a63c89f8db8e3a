"""
The embedded engine: checks requests, and passes them to a backend or, if they have a layout, to the layout decoder.

A backend runs its steps on a thread, and sleep, wake-up and update change memory on another thread. Everything else
here runs on the event loop. Requests that would crash a backend are refused here: its cache cannot hold them, or their
ids are unknown.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from itertools import count
from typing import TYPE_CHECKING, Any

from turnwise.errors import DataError, EngineError, TornWeightsError
from turnwise.protocols import Resources
from turnwise.protocols.weights import TAGS
from turnwise.types import Capabilities, GenerateRequest, GenerateResult
from turnwise.weights.finishing import finish, finish_in_thread
from turnwise.weights.sleep import SleepState
from turnwise_engine_support.freed_memory import release_file_pages
from turnwise_engine_support.grammars import GrammarCompiler, supports_grammars
from turnwise_engine_support.model_directory import model_limit, model_spec, model_vocab_size
from turnwise_engine_support.picture_families import supported_families, supports_pictures
from turnwise_engine_support.pictures import PictureReader
from turnwise_engine_support.requests import check_context, check_not_in_flight, num_new_tokens
from turnwise_engine_support.results import RequestCounters
from turnwise_moe_routes.shapes import COLUMN
from turnwise_transformers_engine.backend import Backend
from turnwise_transformers_engine.config import TransformersConfig
from turnwise_transformers_engine.loading import load_backend, make_layout_decoder, supports_layouts
from turnwise_transformers_engine.requests import Pending
from turnwise_transformers_engine.weights.memory_state import MemoryState, memory_bytes
from turnwise_transformers_engine.weights.served_weights import ServedWeights
from turnwise_transformers_engine.weights.updates import StagedUpdate, stage_update, write_update

if TYPE_CHECKING:
    from turnwise_transformers_engine.layouts.row_pictures import RowPictures

_WATCH_S = 0.5
"""Seconds between checks of the backend's thread, while requests wait for it."""


class TransformersEngine:
    """
    Any causal language model of transformers, and some vision-language ones, in this process, on a CPU or a GPU.

    Args:
        config: the options.
        resources: its `model` is loaded, unless the config names one.
    """

    def __init__(self, config: TransformersConfig, resources: Resources) -> None:
        self._config = config
        self._spec = model_spec(config.model, resources)
        self._backend: Backend | None = None
        self._layouts: Any = None
        self._grammars: GrammarCompiler | None = None
        self._pictures: PictureReader | None = None
        self._started = False
        self._vocab_size = 0
        self._ended = ""
        self._pending: dict[str, Pending] = {}
        self._handles = count()
        self._served = ServedWeights()
        # Sleep, wake-up and update pause the backend, so only one of them runs at a time. Each runs to its end: the
        # thread of a cancelled one must not work during the next.
        self._switching = asyncio.Lock()
        self.sleep_state = SleepState("the transformers engine")
        self._memory: MemoryState | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._unstopped: weakref.finalize[..., Any] | None = None
        self._counters = RequestCounters()

    @property
    def capabilities(self) -> Capabilities:
        # No seeds: the backend of models that cannot be fused samples a step from one random stream.
        levels = frozenset({1, 2} if self._config.sleep else ())
        return Capabilities(
            abort=True,
            layouts=self._supports_layouts,
            weight_updates=True,
            adapter_updates=True,
            grammars=self._supports_grammars,
            sleep_levels=levels,
            max_context=self._max_context,
            vocab_size=self._stated_vocab_size,
            pictures=self._supports_pictures,
            columns=frozenset({COLUMN} if self._config.enable_return_routed_experts else ()),
        )

    @cached_property
    def _supports_layouts(self) -> bool:
        return supports_layouts(self._spec.path)

    @cached_property
    def _supports_grammars(self) -> bool:
        # Where the generic decoder runs, the decoder of layouts serves them.
        return self._supports_layouts and supports_grammars(self._spec.path)

    @cached_property
    def _supports_pictures(self) -> bool:
        return supports_pictures(self._spec.path)

    @cached_property
    def _stated_vocab_size(self) -> int | None:
        return model_vocab_size(self._spec.path)

    @cached_property
    def _max_context(self) -> int:
        limits = (self._config.max_context, model_limit(self._spec.path), self._config.num_cache_tokens)
        return min(limit for limit in limits if limit is not None)

    async def start(self) -> None:
        if self._started or self._ended:
            raise EngineError(f"the transformers engine {self._ended or 'has been started already'}")
        self._started = True
        backend = await asyncio.to_thread(load_backend, self._config, self._spec, self._served, self._max_context)
        if self._ended:
            raise EngineError(f"the transformers engine {self._ended} while it was starting")
        # The decoder has copied some weights, whose pages of the file nothing reads again.
        release_file_pages(backend.model.parameters())
        self._vocab_size = int(backend.model.config.get_text_config().vocab_size)
        self._layouts = make_layout_decoder(self._config, backend, self._served, self._max_context)
        self._memory = MemoryState(backend, self._served)
        if self._supports_grammars and self._spec.path is not None:
            self._grammars = GrammarCompiler(self._spec.path, self._vocab_size)
        if self._supports_pictures and self._spec.path is not None:
            self._pictures = await asyncio.to_thread(PictureReader, self._spec.path)
        backend.start(asyncio.get_running_loop().call_soon_threadsafe)
        self._backend = backend
        # For an engine that is never stopped: a thread inside torch at interpreter exit would abort the process.
        self._unstopped = weakref.finalize(self, backend.stop)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """
        Sample a continuation. The seed of a request counts if the model is fused, or if the request has a layout.

        Log-probabilities are of the sampling distribution, after the grammar, temperature, top-k and top-p; for greedy
        they are 0. A grammar that cannot be compiled is an `EngineError`.
        """
        backend = self._running_backend()
        self._check_serving()
        max_tokens = self._check_request(request)
        pending = Pending(
            request=request,
            handle=f"{request.request_id}#{next(self._handles)}",
            ended=asyncio.get_running_loop().create_future(),
        )
        self._pending[request.request_id] = pending
        in_layouts = not backend.serves(request)
        try:
            if self._grammars is not None and request.grammar is not None:
                pending.grammar = await asyncio.to_thread(self._grammars.start, request)
            if in_layouts:
                pictures = await self._read_pictures(request) if request.pictures else None
                if not pending.ended.done():
                    self._submit_layout(pending, max_tokens, pictures)
            else:
                await backend.wait_for_prefix(pending)
                if not pending.ended.done():
                    backend.submit(pending, max_tokens)
                    self._watch_thread()
            listener = request.on_tokens
            aborted = await (pending.ended if listener is None else pending.follow(listener))
        finally:
            del self._pending[request.request_id]
            pending.release_waiters()
            if in_layouts:
                self._layouts.cancel(pending.handle)
            else:
                backend.cancel(pending)
        result = pending.result(aborted=aborted, version=self._served.version)
        self._counters.count(result)
        return result

    async def abort(self, request_id: str) -> None:
        if request_id in self._pending:
            self._pending[request_id].end(aborted=True)

    async def sleep(self, level: int) -> None:
        """
        Free the KV cache, and at level 2 also the weights. Level 1 keeps them in host memory.

        On a CPU the weights are in host memory already, so level 1 frees only the KV cache and copies of weights.
        """
        self.sleep_state.check_level(level, self.capabilities.sleep_levels)
        async with self._switching:
            await finish(self._sleep(level))

    async def _sleep(self, level: int) -> None:
        memory = self._running_memory()
        # Refuses new requests while those in flight are aborted.
        with self.sleep_state.falling_asleep(level):
            while self._pending:  # each leaves when its `generate` continues
                for pending in self._pending.values():
                    pending.end(aborted=True)
                await asyncio.sleep(0)
            # Before the call, which may free a part of the memory and then fail.
            self.sleep_state.mark_asleep(level)
            await self._while_paused(partial(memory.free, level))

    async def wake_up(self, tags: Iterable[str] = TAGS) -> None:
        """Restore memory. After level 2, requests are refused until `update_weights` has loaded every weight."""
        async with self._switching:
            await finish(self._wake_up(tags))

    async def _wake_up(self, tags: Iterable[str]) -> None:
        memory = self._running_memory()
        for tag in self.sleep_state.tags_to_wake(tags):
            await self._while_paused(partial(memory.restore, tag))
            self.sleep_state.mark_awake(tag)

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """
        Replace weights by name, all or none, and drop the KV cache of the old ones.

        They are copied to host memory first, so a failing source changes nothing; after sleep at level 2 there is
        nothing to keep. Requests in flight are prefilled again under the new weights, and their results have a version
        per token. When a cancelled update returns, it has changed all or nothing.
        """
        async with self._switching:
            memory = self._running_memory()
            self.sleep_state.check_update()
            staged = await finish_in_thread(partial(stage_update, weights, memory))
            await finish(self._write(staged, version, memory))

    async def _write(self, staged: StagedUpdate, version: int, memory: MemoryState) -> None:
        try:
            await self._while_paused(partial(write_update, staged, version, memory))
        except TornWeightsError as error:
            # No decoder runs a step, so these have no token of the mixed weights.
            for pending in self._pending.values():
                pending.fail(TornWeightsError(str(error)))
            raise

    async def _while_paused(self, function: Callable[[], None]) -> None:
        """Run a function that pauses the backend, on a thread; `ReplicaDiedError` if the backend has died."""
        try:
            async with self._layouts.paused():
                try:
                    await finish_in_thread(function)
                finally:
                    self._layouts.forget(free=not self._pending)
        except RuntimeError as error:
            self._running_backend()  # raises if the backend has died
            raise EngineError(f"the transformers engine could not be paused: {error}") from error

    def _running_memory(self) -> MemoryState:
        self._running_backend()
        assert self._memory is not None
        return self._memory

    def _check_serving(self) -> None:
        self.sleep_state.check_serving()
        if self._served.torn:
            raise TornWeightsError(self._served.torn)
        if missing := self._running_memory().missing:
            raise EngineError(
                f"the transformers engine lacks {len(missing)} weights, which sleep level 2 freed: call update_weights"
            )

    def stats(self) -> Mapping[str, float]:
        """Return `num_running`, `num_context_tokens` of these, `weight_version`, `memory_bytes`, and totals."""
        return {
            **self._counters.stats([pending.request for pending in self._pending.values()]),
            "memory_bytes": memory_bytes(self._backend.model.device) if self._backend else 0,
            "weight_version": self._served.version,
        }

    async def stop(self) -> None:
        self._ended = self._ended or "was stopped"
        for pending in self._pending.values():
            pending.end(aborted=True)
        if self._watch is not None:
            self._watch.cancel()
        backend, self._backend = self._backend, None
        if backend is not None:
            if self._unstopped is not None:
                self._unstopped.detach()
            await self._layouts.stop()
            await asyncio.to_thread(backend.stop)

    def _running_backend(self) -> Backend:
        if self._backend is None:
            raise EngineError(f"the transformers engine {self._ended or 'has not been started'}")
        if death := self._backend.death():
            raise death
        return self._backend

    def _check_request(self, request: GenerateRequest) -> int:
        """Return the most tokens to sample; `EngineError` for a request that would crash the backend."""
        if request.pictures and self._pictures is None:
            raise EngineError(
                f"the model {str(self._spec.path)!r} reads no pictures: request {request.request_id!r} has"
                f" {len(request.pictures)}; {supported_families()}"
            )
        check_context(
            request, max_context=self._max_context, vocab_size=self._vocab_size, reads_pictures=self._supports_pictures
        )
        if request.sampling.stop:
            raise EngineError("the transformers engine has no stop strings: use stop_token_ids")
        if request.grammar is not None and self._grammars is None:
            raise EngineError(
                "the transformers engine has no grammars: they need `turnwise-transformers-engine[grammar]`, a"
                " tokenizer.json beside the model, and a model with full attention and rotary positions"
            )
        if request.pictures and request.layout is not None and request.layout.paths:
            raise EngineError("the transformers engine has no parallel paths in contexts with pictures")
        check_not_in_flight(request, self._pending)
        return num_new_tokens(request, self._max_context)

    async def _read_pictures(self, request: GenerateRequest) -> RowPictures:
        """Return the pictures of a request; `EngineError` if one is broken, or does not fit its placeholders."""
        from turnwise_transformers_engine.layouts.row_pictures import RowPictures

        reader, model, places = self._pictures, self._running_backend().model, request.pictures
        assert reader is not None

        def read() -> RowPictures:
            arrays = reader.read(request.token_ids, places)
            axes = reader.family.axes(model, len(request.token_ids), places, arrays)
            return RowPictures(places, arrays, reader.feature_rows(request.token_ids, places), axes)

        try:
            return await asyncio.to_thread(read)
        except DataError as error:
            raise EngineError(f"request {request.request_id!r}: {error}") from error

    def _submit_layout(self, pending: Pending, max_tokens: int, pictures: RowPictures | None) -> None:
        if not self._supports_layouts:
            raise EngineError("the model does not support layouts: they need full attention and rotary positions")

        def on_end(error: Exception | None) -> None:
            pending.num_cached_tokens = row.num_cached
            if error is None:
                pending.end(aborted=False)
            else:
                pending.fail(error)

        row = self._layouts.submit(pending.handle, pending.request, max_tokens, on_end, pending.grammar, pictures)
        pending.output, pending.spans, pending.routes = row.progress, row.progress.spans, row.routes

    def _watch_thread(self) -> None:
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(_WATCH_S, self._check_thread)

    def _check_thread(self) -> None:
        """Fail the waiting requests if the backend's thread has ended without failing them."""
        self._watch = None
        if self._backend is None:
            return
        if death := self._backend.death():
            for pending in self._pending.values():
                pending.fail(death)
        elif self._pending:
            self._watch_thread()
