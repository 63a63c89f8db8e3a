"""
transformers' continuous batching as an engine.

The manager runs its steps on a thread of its own; everything here but `swap_weights` runs on the event loop, to which
the manager brings every token. What the manager does not do is done here: it dies of a request that its cache cannot
hold or whose ids it does not know, says nothing about cancelled ones, and leaves those that wait for it waiting when
its thread has ended.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import count
from typing import Any

from turnwise.errors import EngineError, ReplicaDiedError
from turnwise.protocols import Resources
from turnwise.types import Capabilities, GenerateRequest, GenerateResult
from turnwise_transformers_engine.config import TransformersConfig
from turnwise_transformers_engine.loading import (
    load_layout_decoder,
    load_manager,
    model_limit,
    model_spec,
    takes_layouts,
    vocab_size,
)
from turnwise_transformers_engine.requests import Pending, Reads
from turnwise_transformers_engine.sampling import request_options
from turnwise_transformers_engine.sleeping import TAGS, Residence, memory_bytes
from turnwise_transformers_engine.weights import swap_weights

_WATCH_S = 0.5
"""How often a thread that ended without a word is looked for, while requests wait for it."""


class TransformersEngine:
    """
    Any causal language model of transformers, in this process, on a CPU or a GPU.

    Args:
        config: its options.
        resources: `model` says which model, unless the config does.
    """

    def __init__(self, config: TransformersConfig, resources: Resources) -> None:
        self._config = config
        self._spec = model_spec(config, resources)
        self._manager: Any = None
        self._layouts: Any = None
        self._started = False
        self._vocab_size = 0
        self._ended = ""
        self._last_failure = ""
        self._pending: dict[str, Pending] = {}
        self._reads = Reads(config.tokens_per_page)
        self._handles = count()
        self._version = 0
        self._switching = asyncio.Lock()
        self._falling_asleep = False
        self._residence: Residence | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._unstopped: weakref.finalize[..., Any] | None = None
        self._totals = {"num_requests": 0, "num_sampled_tokens": 0, "num_cached_tokens": 0}

    @property
    def capabilities(self) -> Capabilities:
        """No seeds: the manager draws all requests of a step from one stream. No stop strings."""
        levels = frozenset({1, 2} if self._config.sleep else ())
        return Capabilities(
            abort=True,
            layouts=self._takes_layouts,
            weight_updates=True,
            sleep_levels=levels,
            max_context=self._max_context,
        )

    @cached_property
    def _takes_layouts(self) -> bool:
        return takes_layouts(self._spec.path)

    @cached_property
    def _max_context(self) -> int:
        limits = (self._config.max_context, model_limit(self._spec.path), self._config.num_cache_tokens)
        return min(limit for limit in limits if limit is not None)

    async def start(self) -> None:
        """Load the model; `EngineError` says in one line what is wrong with it, the packages or the sizes."""
        if self._started or self._ended:
            raise EngineError(f"the transformers engine {self._ended or 'has been started already'}")
        self._started = True
        manager = await asyncio.to_thread(load_manager, self._config, self._spec, self._max_context)
        if self._ended:
            raise EngineError(f"the transformers engine {self._ended} while it was starting")
        self._vocab_size = vocab_size(manager)
        self._count_cached_tokens(manager.batch_processor.cache)
        self._layouts = load_layout_decoder(self._config, manager, self._max_context)
        # A thread is a daemon if the one that starts it is: an engine that nobody stops must not keep the process.
        starter = threading.Thread(target=manager.start, daemon=True)
        starter.start()
        starter.join()
        self._manager = manager
        # Also for an engine that nobody stops: a thread inside torch while the interpreter ends aborts the process.
        self._unstopped = weakref.finalize(self, manager.stop, hard_stop=True)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """
        Sample a continuation. The log-probabilities are those of the distribution drawn from: after temperature, top-k
        and top-p; greedy draws from one id, so they are 0. A request's seed is looked at if it has a layout.
        """
        manager = self._running_manager()
        if why_not := "is falling asleep" if self._falling_asleep else self._residence_of(manager).why_not:
            raise EngineError(f"the transformers engine {why_not}")
        max_tokens = self._room(request)
        pending = Pending(
            request=request,
            handle=f"{request.request_id}#{next(self._handles)}",
            ended=asyncio.get_running_loop().create_future(),
            spans=[(0, self._version)],
        )
        self._pending[request.request_id] = pending
        try:
            if request.layout is not None:
                self._submit_layout(pending, max_tokens)
            else:
                if self._config.prefix_caching:
                    await self._reads.wait(pending)
                if not pending.ended.done():
                    self._submit(manager, pending, max_tokens)
            aborted = await pending.ended
        finally:
            del self._pending[request.request_id]
            pending.let_go()
            if request.layout is not None:
                self._layouts.cancel(pending.handle)
            elif pending.output is None or not pending.output.is_finished():
                self._cancel(manager, pending)
        result = pending.result(aborted=aborted)
        self._count(result)
        return result

    async def abort(self, request_id: str) -> None:
        """End a request with the tokens that have come back; unknown ids are ignored."""
        if request_id in self._pending:
            self._pending[request_id].end(aborted=True)

    async def sleep(self, level: int) -> None:
        """
        Free the KV cache, and at level 2 the weights too; at level 1 they are kept in host memory.

        On a CPU level 1 leaves the weights where they are: that is host memory. Requests in flight end with `abort`.
        """
        if level not in self.capabilities.sleep_levels:
            raise EngineError(f"the transformers engine has no sleep level {level}")
        async with self._switching:
            residence = self._residence_of(self._running_manager())
            self._falling_asleep = True
            try:
                while self._pending:  # each is gone when its `generate` has run on
                    for pending in self._pending.values():
                        pending.end(aborted=True)
                    await asyncio.sleep(0)
                await self._while_paused(residence.sleep, level)
            finally:
                self._falling_asleep = False

    async def wake_up(self, tags: Iterable[str] = TAGS) -> None:
        """Take memory again; after level 2 requests are refused until `update_weights` has brought every weight."""
        tags = tuple(tags)
        if unknown := sorted(set(tags) - set(TAGS)):
            raise EngineError(f"unknown memory tags {unknown}; known: {', '.join(TAGS)}")
        async with self._switching:
            await self._while_paused(self._residence_of(self._running_manager()).wake_up, tags)

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """
        Replace weights by name, all or none, and drop every key and value of the old ones.

        They are copied to host memory first, so that nothing is changed when their source breaks off. Requests in
        flight go on from their own tokens, read again under the new weights; their results carry a version for each
        token. `EngineError` for a name or shape that the model has not.
        """
        loop = asyncio.get_running_loop()

        def on_swapped(names: Iterable[str]) -> None:
            # Behind every token of the old weights in the loop's queue, and before any of the new ones.
            residence.brought(names)
            loop.call_soon_threadsafe(self._begin_version, version)

        async with self._switching:
            manager = self._running_manager()
            residence = self._residence_of(manager)
            if "weights" not in residence.awake:
                raise EngineError("cannot update the weights: their memory is asleep; wake up weights first")
            await self._while_paused(swap_weights, manager, weights, on_swapped)

    async def _while_paused(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run what pauses the manager, on a thread; a manager that has died says so."""
        try:
            async with self._layouts.paused():
                try:
                    await asyncio.to_thread(function, *arguments)
                finally:
                    self._layouts.forget(free=not self._pending)
        except RuntimeError as error:
            manager = self._running_manager()  # raises its death, if that is why
            raise EngineError(f"the transformers engine could not be paused: {error}") from (error if manager else None)

    def _residence_of(self, manager: Any) -> Residence:
        if self._residence is None or self._residence.manager is not manager:
            self._residence = Residence(manager)
        return self._residence

    def stats(self) -> Mapping[str, float]:
        """Return `num_running`, `num_context_tokens` of these, `weight_version`, `memory_bytes`, and totals."""
        return {
            "num_running": len(self._pending),
            "memory_bytes": memory_bytes(self._manager.model.device) if self._manager else 0,
            "num_context_tokens": sum(len(pending.request.token_ids) for pending in self._pending.values()),
            "weight_version": self._version,
            **self._totals,
        }

    async def stop(self) -> None:
        """End requests in flight with `abort`, the manager's thread, and free the model. Harmless at any time."""
        self._ended = self._ended or "was stopped"
        for pending in self._pending.values():
            pending.end(aborted=True)
        if self._watch is not None:
            self._watch.cancel()
        manager, self._manager = self._manager, None
        if manager is not None:
            if self._unstopped is not None:
                self._unstopped.detach()
            await self._layouts.stop()
            await asyncio.to_thread(manager.stop, hard_stop=True)

    def _running_manager(self) -> Any:
        if self._manager is None:
            raise EngineError(f"the transformers engine {self._ended or 'has not been started'}")
        if death := self._death(self._manager):
            raise death
        return self._manager

    def _death(self, manager: Any) -> ReplicaDiedError | None:
        """Return why the manager's thread serves no more, or None while it does."""
        status = manager.background_thread_status
        if manager.is_running() and status.can_accept_new_requests() is None:
            return None
        # A thread that dies fails its requests first, and notes the cause after that.
        cause = status.fatal_error or self._last_failure or "it left no error"
        return ReplicaDiedError(f"the transformers engine's thread died: {cause}")

    def _room(self, request: GenerateRequest) -> int:
        """Return how many tokens may be sampled; `EngineError` for what the manager would die of."""
        num_context, sampling = len(request.token_ids), request.sampling
        if num_context == 0:
            raise EngineError(f"request {request.request_id!r} has an empty context")
        if num_context >= self._max_context:
            raise EngineError(
                f"request {request.request_id!r} has a context of {num_context} tokens: max_context is"
                f" {self._max_context}, output included"
            )
        if request.token_ids.min() < 0 or request.token_ids.max() >= self._vocab_size:
            raise EngineError(f"request {request.request_id!r} has ids outside the vocabulary of {self._vocab_size}")
        if sampling.stop:
            raise EngineError("the transformers engine has no stop strings: use stop_token_ids")
        if request.request_id in self._pending:
            raise EngineError(f"request {request.request_id!r} is in flight already")
        return min(sampling.max_tokens or self._max_context, self._max_context - num_context)

    def _submit(self, manager: Any, pending: Pending, max_tokens: int) -> None:
        sampling = pending.request.sampling
        manager.register_result_handler(pending.handle, self._receiver(manager, pending))
        accepted = manager.add_request(
            pending.request.token_ids.tolist(),
            request_id=pending.handle,
            max_new_tokens=max_tokens,
            eos_token_id=list(sampling.stop_token_ids),
            # Every token is brought at once: a request that is cut short must not lose what it had.
            streaming=True,
            **request_options(sampling, self._vocab_size),
        )
        if accepted is None:
            raise self._death(manager) or EngineError("the transformers engine refused the request")
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(_WATCH_S, self._look_after, manager)

    def _submit_layout(self, pending: Pending, max_tokens: int) -> None:
        if not self.capabilities.layouts:
            raise EngineError("this model takes no layouts: it needs full attention and rotary positions")

        def on_end(error: Exception | None) -> None:
            pending.num_cached_tokens = row.num_cached
            if error is None:
                pending.end(aborted=False)
            else:
                pending.fail(error)

        row = self._layouts.submit(pending.handle, pending.request, max_tokens, on_end)
        pending.output = row.progress

    def _receiver(self, manager: Any, pending: Pending) -> Callable[[Any], None]:
        def receive(output: Any) -> None:
            if pending.ended.done():
                return
            if output.error is not None:
                self._last_failure = output.error
                failure = EngineError(f"request {pending.request.request_id!r} failed: {output.error}")
                pending.fail(self._death(manager) or failure)
            else:
                pending.bring(output)

        return receive

    def _cancel(self, manager: Any, pending: Pending) -> None:
        """Free the manager's slot, and what it keeps for a request of which it will say no more."""
        manager.cancel_request(pending.handle)
        manager.output_router.result_handlers.pop(pending.handle, None)
        # Tokens that were under way find no handler and would gather in the queue for results nobody handles.
        while manager.get_result(timeout=0) is not None:
            pass

    def _look_after(self, manager: Any) -> None:
        """Fail all that wait for a thread that ended without failing them itself."""
        self._watch = None
        if death := self._death(manager):
            for pending in self._pending.values():
                pending.fail(death)
        elif self._pending:
            self._watch = asyncio.get_running_loop().call_later(_WATCH_S, self._look_after, manager)

    def _begin_version(self, version: int) -> None:
        self._version = version
        for pending in self._pending.values():
            pending.begin_version(version)

    def _count_cached_tokens(self, cache: Any) -> None:
        """Listen to the cache's search for known prefixes, the only place that knows how much it found."""
        search = cache.search_prefix_match

        def searched(handle: str, prompt_ids: list[int]) -> int:
            num_found: int = search(handle, prompt_ids)
            pending = self._pending.get(handle.rpartition("#")[0])
            if pending is not None and pending.handle == handle and pending.output is None:
                pending.num_cached_tokens = num_found
            return num_found

        cache.search_prefix_match = searched

    def _count(self, result: GenerateResult) -> None:
        self._totals["num_requests"] += 1
        self._totals["num_sampled_tokens"] += len(result.token_ids)
        self._totals["num_cached_tokens"] += result.num_cached_tokens
