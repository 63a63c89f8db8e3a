"""The ways to decode plain requests, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from turnwise.errors import ReplicaDiedError
from turnwise.types import GenerateRequest
from turnwise_transformers_engine.requests import Pending
from turnwise_transformers_engine.routes import RouteStore


class Backend(Protocol):
    """
    Decodes plain requests on its own thread.

    It gives each token the version that its `ServedWeights` have in the step that samples the token, and runs no step
    while they are torn. Methods run on the event loop, except `paused` and methods that need a pause, which run on any
    thread. After the thread has ended, `paused` raises `RuntimeError`.
    """

    @property
    def model(self) -> Any:
        """The model of transformers."""

    @property
    def routes(self) -> RouteStore | None:
        """The experts of the tokens in its cache; None if they are not returned."""

    def serves(self, request: GenerateRequest) -> bool:
        """Return whether it takes a request; else the decoder of layouts does."""

    def start(self, call_soon: Callable[..., object]) -> None:
        """Start the thread; `call_soon` queues a call on the event loop."""

    def stop(self) -> None:
        """End the thread. Blocks until a step has ended."""

    def death(self) -> ReplicaDiedError | None:
        """Return the error of a thread that has ended, or None while it runs."""

    async def wait_for_prefix(self, pending: Pending) -> None:
        """Return when another request has prefilled the same context, if there is one."""

    def submit(self, pending: Pending, max_tokens: int) -> None:
        """Start a request. Its output appears in `pending`."""

    def cancel(self, pending: Pending) -> None:
        """End a request that has not finished, and free its memory."""

    def paused(self) -> AbstractContextManager[None]:
        """Start no step during the block."""

    def has_requests(self) -> bool:
        """Whether a request uses memory; only while paused."""

    def drop_keys_values(self) -> None:
        """Drop all keys and values after an update, while paused; requests in flight are prefilled again."""

    def free_cache(self) -> None:
        """Free the KV cache, while paused and without requests."""

    def restore_cache(self) -> None:
        """Allocate an empty KV cache again, while paused."""

    def release_weights(self) -> None:
        """Drop references to weights that are about to be freed, while paused."""

    def bind_weights(self) -> None:
        """Use weights that were allocated again, while paused."""
