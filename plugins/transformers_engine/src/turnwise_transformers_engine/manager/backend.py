"""
transformers' continuous batching as a backend of the engine, for every causal language model.

This module adds what the manager lacks: it reports nothing about cancelled requests, and if its thread ends, the
requests wait forever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

from attrs import define, field

from turnwise.errors import EngineError, ReplicaDiedError
from turnwise.types import GenerateRequest
from turnwise_transformers_engine.manager.sampling import request_options
from turnwise_transformers_engine.requests import Pending, PrefillDeduplicator
from turnwise_transformers_engine.routes import RequestRoutes, RouteStore, note_steps
from turnwise_transformers_engine.weights.served_weights import ServedWeights


@define(eq=False)
class ManagerBackend:
    """
    See `Backend`.

    Attributes:
        manager: warmed up but not started.
        served: the weights that it reads.
        page_size: tokens of a page.
        prefix_caching: let requests wait for another one with the same context.
        routes: of the tokens in its cache; None if they are not returned.
    """

    manager: Any
    served: ServedWeights
    page_size: int
    prefix_caching: bool
    routes: RouteStore | None = None
    _requests: dict[str, Pending] = field(factory=dict, init=False)
    _deduplicator: PrefillDeduplicator = field(init=False)
    _last_failure: str = field(default="", init=False)
    _cache_bytes: int = field(default=0, init=False)
    _call_soon: Callable[..., object] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._deduplicator = PrefillDeduplicator(self.page_size)
        self._count_cached_tokens(self.manager.batch_processor.cache)
        self._schedule_whole_weights_only(self.manager.batch_processor.scheduler)
        if self.routes is not None:
            note_steps(self.manager.batch_processor, self.routes, self._find_routes, self.page_size)

    @property
    def model(self) -> Any:
        return self.manager.model

    @property
    def vocab_size(self) -> int:
        """Number of ids of the model."""
        return int(self.model.config.get_text_config().vocab_size)

    def serves(self, request: GenerateRequest) -> bool:
        return request.layout is None and request.grammar is None

    def start(self, call_soon: Callable[..., object]) -> None:
        self._call_soon = call_soon
        # Replaced, because the version must be read on the thread that samples the tokens, and before the next pause.
        self.manager.output_router.deliver_batch = self._deliver
        self.manager.output_router.deliver = lambda output: self._deliver([output])
        # The manager's thread inherits `daemon` from the thread that starts it. An engine that is never stopped must
        # not keep the process alive.
        starter = threading.Thread(target=self.manager.start, daemon=True)
        starter.start()
        starter.join()

    def stop(self) -> None:
        self.manager.stop(hard_stop=True)

    def death(self) -> ReplicaDiedError | None:
        status = self.manager.background_thread_status
        if self.manager.is_running() and status.can_accept_new_requests() is None:
            return None
        # A dying thread fails its requests before it stores the cause.
        cause = status.fatal_error or self._last_failure or "it left no error"
        return ReplicaDiedError(f"the transformers engine's thread died: {cause}")

    async def wait_for_prefix(self, pending: Pending) -> None:
        if self.prefix_caching:
            await self._deduplicator.wait(pending)

    def submit(self, pending: Pending, max_tokens: int) -> None:
        sampling = pending.request.sampling
        pending.routes = None if self.routes is None else self.routes.make_request()
        self._requests[pending.handle] = pending
        accepted = self.manager.add_request(
            pending.request.token_ids.tolist(),
            request_id=pending.handle,
            max_new_tokens=max_tokens,
            eos_token_id=list(sampling.stop_token_ids),
            # Deliver every token as it is sampled, so that an aborted request has them.
            streaming=True,
            **request_options(sampling, self.vocab_size),
        )
        if accepted is None:
            raise self.death() or EngineError("transformers refused the request")

    def cancel(self, pending: Pending) -> None:
        """Free the manager's slot; late tokens find no request."""
        self._requests.pop(pending.handle, None)
        if pending.output is None or not pending.output.is_finished():
            self.manager.cancel_request(pending.handle)

    def paused(self) -> AbstractContextManager[None]:
        return cast(AbstractContextManager[None], self.manager.pause())

    def has_requests(self) -> bool:
        queues = self.manager.input_queue, self.manager.cancel_queue
        pending = self.manager.batch_processor.scheduler.has_pending_requests()
        return bool(pending) or not all(queue.empty() for queue in queues)

    def drop_keys_values(self) -> None:
        """
        Return every request in flight to the queue, to be prefilled again, and empty the prefix cache.

        Eviction alone would keep the pages of requests in flight: the next request with their prompt would continue
        from keys and values of the old weights. So they get what the manager does to a request that it has no memory
        for: their pages are freed, and they are queued again with their tokens as a longer prompt.
        """
        from transformers.generation.continuous_batching.requests import RequestStatus

        scheduler, cache = self.manager.batch_processor.scheduler, self.manager.batch_processor.cache
        for request_id, state in list(scheduler.active_requests.items()):
            cache.free_blocks(request_id, no_cache=True)
            again = state.create_equivalent_initial_request()
            state.status = RequestStatus.FINISHED
            scheduler.finish_request(request_id)
            scheduler.add_waiting_request(again)
        cache.evict_cached_blocks()

    def free_cache(self) -> None:
        from turnwise_transformers_engine.manager import paged_step

        cache = self.manager.batch_processor.cache
        cache.evict_cached_blocks()
        paged_step.forget(cache)
        storage = cache.cache_tensor.untyped_storage()
        self._cache_bytes = storage.nbytes()
        storage.resize_(0)

    def restore_cache(self) -> None:
        tensor = self.manager.batch_processor.cache.cache_tensor
        if not tensor.untyped_storage().nbytes():  # freeing it may have failed
            tensor.untyped_storage().resize_(self._cache_bytes)
        tensor.zero_()

    def release_weights(self) -> None:
        """Do nothing: the manager reads the model's parameters."""

    def bind_weights(self) -> None:
        """Do nothing: the manager reads the model's parameters."""

    def _find_routes(self, handle: str) -> RequestRoutes | None:
        pending = self._requests.get(handle)
        return None if pending is None else pending.routes

    def _deliver(self, outputs: list[Any]) -> None:
        """Tell the event loop about a step, from the manager's thread."""
        try:
            self._call_soon(partial(self._receive, outputs, self.served.version))
        except RuntimeError:
            # The loop was closed without stopping the engine; nothing waits any more.
            return

    def _receive(self, outputs: list[Any], version: int) -> None:
        for output in outputs:
            pending = self._requests.get(output.request_id)
            if pending is None or pending.ended.done():
                continue
            if output.error is not None:
                self._last_failure = output.error
                failure = EngineError(f"request {pending.request.request_id!r} failed: {output.error}")
                pending.fail(self.death() or failure)
            else:
                pending.on_output(output, version)

    def _schedule_whole_weights_only(self, scheduler: Any) -> None:
        """Let a step find nothing to do while the weights are torn: the manager cannot stay paused between calls."""
        schedule = scheduler.schedule_batch

        def schedule_batch(*budgets: object) -> Any:
            return ([], False, 0, 0) if self.served.torn else schedule(*budgets)

        scheduler.schedule_batch = schedule_batch

    def _count_cached_tokens(self, cache: Any) -> None:
        """Wrap the cache's prefix search, the only place where the number of cached tokens is known."""
        search = cache.search_prefix_match

        def search_and_count(handle: str, prompt_ids: list[int]) -> int:
            num_found: int = search(handle, prompt_ids)
            pending = self._requests.get(handle)
            if pending is not None and pending.output is None:
                pending.num_cached_tokens = num_found
            return num_found

        cache.search_prefix_match = search_and_count
