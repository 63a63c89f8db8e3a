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
from typing import TYPE_CHECKING, Any

from turnwise.errors import EngineError, ReplicaDiedError
from turnwise.protocols import Resources
from turnwise.types import Capabilities, GenerateRequest, GenerateResult
from turnwise_transformers_engine.config import TransformersConfig
from turnwise_transformers_engine.loading import load_manager, model_limit, model_spec, vocab_size
from turnwise_transformers_engine.requests import Pending
from turnwise_transformers_engine.sampling import request_options
from turnwise_transformers_engine.weights import swap_weights

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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
        self._started = False
        self._vocab_size = 0
        self._ended = ""
        self._last_failure = ""
        self._pending: dict[str, Pending] = {}
        self._handles = count()
        self._version = 0
        self._updating = asyncio.Lock()
        self._watch: asyncio.TimerHandle | None = None
        self._unstopped: weakref.finalize[..., Any] | None = None
        self._totals = {"num_requests": 0, "num_sampled_tokens": 0, "num_cached_tokens": 0}

    @property
    def capabilities(self) -> Capabilities:
        """No seeds: the manager draws all requests of a step from one stream. No sleep levels, no stop strings."""
        return Capabilities(abort=True, weight_updates=True, max_context=self._max_context)

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
        and top-p; greedy draws from one id, so they are 0. A request's seed is not looked at.
        """
        manager = self._running_manager()
        max_tokens = self._room(request)
        pending = Pending(
            request=request,
            handle=f"{request.request_id}#{next(self._handles)}",
            ended=asyncio.get_running_loop().create_future(),
            spans=[(0, self._version)],
        )
        self._pending[request.request_id] = pending
        try:
            self._submit(manager, pending, max_tokens)
            aborted = await pending.ended
        finally:
            del self._pending[request.request_id]
            if pending.output is None or not pending.output.is_finished():
                self._cancel(manager, pending)
        result = pending.result(aborted=aborted)
        self._count(result)
        return result

    async def abort(self, request_id: str) -> None:
        """End a request with the tokens that have come back; unknown ids are ignored."""
        if request_id in self._pending:
            self._pending[request_id].end(aborted=True)

    async def sleep(self, level: int) -> None:
        """Raise `EngineError`: this engine has no sleep levels."""
        raise EngineError(f"the transformers engine cannot sleep (level {level}): it has no sleep levels")

    async def wake_up(self, tags: Iterable[str] = ("weights", "kv_cache")) -> None:
        """Raise `EngineError`: this engine has no sleep levels."""
        raise EngineError(f"the transformers engine cannot wake up {', '.join(tags)}: it has no sleep levels")

    async def update_weights(self, weights: Iterable[tuple[str, NDArray[np.generic]]], version: int) -> None:
        """
        Replace weights by name, all or none, and drop every key and value of the old ones.

        Requests in flight go on from their own tokens, read again under the new weights; their results carry a version
        for each token. `EngineError` for a name or shape that the model has not.
        """
        loop = asyncio.get_running_loop()

        def on_swapped() -> None:
            # Behind every token of the old weights in the loop's queue, and before any of the new ones.
            loop.call_soon_threadsafe(self._begin_version, version)

        async with self._updating:
            manager = self._running_manager()
            try:
                await asyncio.to_thread(swap_weights, manager, weights, on_swapped)
            except RuntimeError as error:
                raise self._death(manager) or EngineError(f"cannot update the weights: {error}") from error

    def stats(self) -> Mapping[str, float]:
        """Return `num_running`, `num_context_tokens` of these, `weight_version`, and totals since the start."""
        return {
            "num_running": len(self._pending),
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

    def _receiver(self, manager: Any, pending: Pending) -> Callable[[Any], None]:
        def receive(output: Any) -> None:
            if pending.ended.done():
                return
            if output.error is not None:
                self._last_failure = output.error
                failure = EngineError(f"request {pending.request.request_id!r} failed: {output.error}")
                pending.fail(self._death(manager) or failure)
            else:
                pending.output = output
                if output.is_finished():
                    pending.end(aborted=False)

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
