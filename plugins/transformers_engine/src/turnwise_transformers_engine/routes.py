"""
The experts that the model chose for each token of a request, of cached tokens too.

A store has the routes of each slot of a KV cache: a request that finds its prefix in the cache reads there what the
request chose that computed it. A request keeps the first routes of each token. After a weight update the token is
computed again, but what was sampled after it came from the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attrs import define, field
from numpy.typing import ArrayLike, NDArray

from turnwise_moe_routes.shapes import Routes, RouteShape

if TYPE_CHECKING:
    from turnwise_moe_routes.recording import Recording, RouteRecorder

_SPARE: Final = 1024


@define(eq=False)
class RequestRoutes:
    """
    The routes of a request, whose tokens get theirs in order.

    Attributes:
        shape: of the model's routes.
        num_known: the first tokens have routes.
    """

    shape: RouteShape
    num_known: int = field(default=0, init=False)
    _parts: list[Routes] = field(factory=list, init=False)

    def extend(self, start: int, values: Routes) -> None:
        """Take the routes of tokens from `start` on, without the known ones."""
        new = values[self.num_known - start :]
        if len(new):
            self._parts.append(new)
            self.num_known += len(new)

    def column(self, num_tokens: int) -> Routes:
        """Return the routes of the first tokens; one that has not run has none."""
        # Another thread may append meanwhile.
        known = np.concatenate([self.shape.unknown(0), *list(self._parts)])[:num_tokens]
        return np.concatenate([known, self.shape.unknown(num_tokens - len(known))])


@define(eq=False)
class RouteStore:
    """
    The routes of the tokens in a KV cache.

    Attributes:
        recorder: attached to the model.
    """

    recorder: RouteRecorder
    _slots: Routes = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._slots = self.recorder.shape.unknown(0)

    def recording(self) -> AbstractContextManager[Recording]:
        """Record the forward pass of the body."""
        return self.recorder.recording()

    def make_request(self) -> RequestRoutes:
        """Return the routes of a new request."""
        return RequestRoutes(self.recorder.shape)

    def write(self, slots: ArrayLike, values: Routes) -> None:
        """Store (n, layers, top_k) routes of the tokens in (n,) slots."""
        where = np.asarray(slots, np.int64)
        if where.size and int(where.max()) >= len(self._slots):
            grown = self.recorder.shape.unknown(int(where.max()) + 1 + len(self._slots) // 2 + _SPARE)
            grown[: len(self._slots)] = self._slots
            self._slots = grown
        self._slots[where] = values

    def read(self, slots: ArrayLike) -> Routes:
        """Return (n, layers, top_k) routes of the tokens in (n,) slots."""
        return self._slots[np.asarray(slots, np.int64)]

    def clear(self) -> None:
        """Forget all slots."""
        self._slots = self.recorder.shape.unknown(0)


Slots = Callable[[str, int, int], NDArray[np.int64]]


def note_steps(
    batch_processor: Any, store: RouteStore, find: Callable[[str], RequestRoutes | None], page_size: int
) -> None:
    """
    Let a request of transformers' manager note the routes of its tokens at each step.

    Args:
        batch_processor: of the manager; its model has the recorder's hooks.
        store: of its cache.
        find: returns the routes of a request by the manager's id; None for one that nobody waits for.
        page_size: tokens of a page.
    """
    runner, ios, cache = batch_processor.model_runner, batch_processor.inputs_and_outputs, batch_processor.cache
    compute = runner.compute_batch

    def slots_of(request_id: str, start: int, stop: int) -> NDArray[np.int64]:
        blocks = np.asarray(cache.cache_allocators["full_attention"].block_table[request_id], np.int64)
        places = np.arange(start, stop)
        found: NDArray[np.int64] = blocks[places // page_size] * page_size + places % page_size
        return found

    def compute_batch(model: object, batch_data: object) -> None:
        with store.recording() as found:
            compute(model, batch_data)
        if ios.compute_stream is not None:
            ios.compute_stream.synchronize()
        # Without shared pages no request finds a prefix, and a cache with sliding windows has no pages for all tokens.
        shared = slots_of if cache.use_prefix_sharing else None
        note_batch(found.routes(), ios.requests_in_batch, store, find, shared)

    runner.compute_batch = compute_batch


def note_batch(
    routes: Routes,
    batch: Sequence[Any],
    store: RouteStore,
    find: Callable[[str], RequestRoutes | None],
    slots_of: Slots | None,
) -> None:
    """Give the routes of a step, request after request, to the requests and to the store."""
    cursor = 0
    for entry in batch:
        request_id, stop = entry.state.request_id, entry.state.position_offset
        start = stop - entry.query_length
        own = routes[cursor : cursor + entry.query_length]
        cursor += entry.query_length
        request = find(request_id)
        if slots_of is not None:
            store.write(slots_of(request_id, start, stop), own)
        if request is None:
            continue
        if slots_of is not None and request.num_known < start:
            request.extend(request.num_known, store.read(slots_of(request_id, request.num_known, start)))
        request.extend(start, own)
