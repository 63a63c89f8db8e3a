"""The contract of engines: one replica. Import `Engine` from `turnwise.protocols` or `turnwise`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from turnwise.protocols.weights import TAGS, Weight
from turnwise.types import Capabilities, GenerateRequest, GenerateResult


@runtime_checkable
class Engine(Protocol):
    """
    One replica: token ids in, token ids and log-probabilities out. It never sees text.

    All methods run on one event loop. After `stop` nothing but `stop` may be called.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the engine; constant, and known before `start`."""

    async def start(self) -> None:
        """Load the weights; raises `EngineError` with a cause that the user can act on."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """
        Continue a context.

        Cancelling the call frees the slot. Raises `EngineError` when the request cannot be served: an empty
        context, one that is longer than `max_context`, an engine that sleeps or was stopped.
        """

    async def abort(self, request_id: str) -> None:
        """End a request early: its `generate` returns the sampled tokens with `abort`. Unknown ids are ignored."""

    async def sleep(self, level: int) -> None:
        """
        Free memory: level 1 keeps the weights in host memory, level 2 drops them; both drop the KV cache. Idempotent.

        Requests in flight end first, as by `abort`. Until everything is awake again `generate` raises an `EngineError`
        that says "asleep". `EngineError` for a level that is not in `capabilities.sleep_levels`.
        """

    async def wake_up(self, tags: Iterable[str] = TAGS) -> None:
        """
        Restore the memory of these tags; `EngineError` for an unknown tag. Idempotent.

        After level 2 the weights are empty: wake `weights`, call `update_weights` with all of them, wake `kv_cache`.
        Without the update `generate` still refuses, unless the engine has read the model's files again.
        """

    async def update_weights(self, weights: Iterable[Weight], version: int) -> None:
        """
        Replace weights by name, all or nothing, drop stale caches, and return `version` with later results.

        Requests may be in flight; each of their tokens carries the version that sampled it.

        Args:
            weights: names of the Hugging Face state dict, or some of them; each with a numpy array (bfloat16 is
                `ml_dtypes.bfloat16`) or, from a transport that delivers on the device, a torch tensor. Arrays may be
                read-only views that are valid only until the next item: copy them. Iterating may block and may raise:
                keep it off the event loop. A `turnwise.protocols.weights.WeightSource` also has `specs`, so that the
                engine can check names and shapes before it writes anything. With `capabilities.adapter_updates` also
                LoRA adapters: `MODULE.lora_A.weight` (r, in) and `MODULE.lora_B.weight` (out, r), which includes the
                scale. They replace the module's earlier adapter, on top of its last `MODULE.weight`.
            version: of these weights.

        Raises:
            EngineError: nothing changed, and the old version is still served: the model lacks a name or has another
                shape, the iterator raised, or the memory of the weights is asleep.
            TornWeightsError: the update failed after a change: `generate` raises it too, until an update with all
                weights succeeds.
        """

    def stats(self) -> Mapping[str, float]:
        """Return load and cache numbers: `num_running` at least; `memory_bytes` held on the device, if it can tell."""

    async def stop(self) -> None:
        """Free everything; requests in flight end with `abort`. Idempotent."""
