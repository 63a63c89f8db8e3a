"""The contract of engines: what one replica must do. Import `Engine` from `turnwise.protocols` or `turnwise`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from turnwise.types import Capabilities, GenerateRequest, GenerateResult


@runtime_checkable
class Engine(Protocol):
    """
    One replica: token ids in, token ids and log-probabilities out. It never sees text.

    All methods run on one event loop. After `stop` nothing but `stop` may be called.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; constant, and known before `start`."""

    async def start(self) -> None:
        """Load the weights and get ready; raises `EngineError` with a cause that the user can act on."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """
        Continue a context.

        Cancelling the call frees the slot. Raises `EngineError` when the request cannot be served: an empty
        context, one that is longer than `max_context`, an engine that sleeps or was stopped.
        """

    async def abort(self, request_id: str) -> None:
        """End a request early: its `generate` returns what was sampled, with `abort`. Unknown ids are ignored."""

    async def sleep(self, level: int) -> None:
        """
        Free memory: level 1 keeps the weights in host memory, level 2 drops them; both drop the KV cache. Idempotent.

        Requests in flight end first, as by `abort`. Until everything is awake again `generate` raises an `EngineError`
        that says "asleep". `EngineError` for a level that `capabilities.sleep_levels` has not.
        """

    async def wake_up(self, tags: Iterable[str] = ("weights", "kv_cache")) -> None:
        """
        Take the memory of these tags again; `EngineError` for an unknown tag. Idempotent.

        After level 2 the weights hold nothing: wake `weights`, call `update_weights` with all of them, wake `kv_cache`.
        Without the update `generate` goes on refusing, unless the engine has read them from the model's files again.
        """

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """
        Replace weights by name, all or nothing, drop stale caches, and answer with `version` from then on.

        Called also with requests in flight; their tokens carry the version that each was sampled under.

        Args:
            weights: names of the Hugging Face state dict, or some of them; each with a numpy array (bfloat16 is
                `ml_dtypes.bfloat16`) or, from a transport that delivers on the device, a torch tensor. Arrays may be
                read-only views that live only until the next is taken: copy. Iterating may block and may raise: keep
                it off the event loop. A `turnwise.weights.WeightSource` has `specs` as well, so that names and shapes
                can be checked before anything is written.
            version: of these weights.

        Raises:
            EngineError: nothing was changed, the old version serves on: a name or shape that the model has not, an
                error of the iterator, memory of the weights asleep.
            TornWeightsError: it failed when something was already changed: `generate` raises it too, until an update
                with all weights has succeeded.
        """

    def stats(self) -> Mapping[str, float]:
        """Return load and cache numbers: `num_running` at least; `memory_bytes` held on the device, if it can tell."""

    async def stop(self) -> None:
        """Free everything; requests in flight end with `abort`. Idempotent."""
