"""The backend of a vision-language model, which leaves every request to the decoder of layouts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from attrs import frozen

from turnwise.errors import ConfigError, EngineError, ReplicaDiedError
from turnwise.types import GenerateRequest
from turnwise_transformers_engine.config import TransformersConfig
from turnwise_transformers_engine.requests import Pending
from turnwise_transformers_engine.routes import RouteStore

_UNUSED: Final = ("decoder", "num_blocks", "page_size", "prefix_caching")
"""Options of the other backends, which this one could not follow."""


@frozen(eq=False)
class VisionBackend:
    """
    See `Backend`. It has no thread and no cache: the decoder of layouts, which the engine pauses itself, has both.

    Attributes:
        model: a vision-language model of transformers.
        routes: have the recorder of its experts; None if they are not returned.
    """

    model: Any
    routes: RouteStore | None = None

    def serves(self, _request: GenerateRequest) -> bool:
        return False

    def start(self, call_soon: Callable[..., object]) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""

    def death(self) -> ReplicaDiedError | None:
        return None

    async def wait_for_prefix(self, pending: Pending) -> None:
        """Return at once."""

    def submit(self, pending: Pending, max_tokens: int) -> None:
        raise EngineError(f"request {pending.request.request_id!r} of a vision-language model needs the other decoder")

    def cancel(self, pending: Pending) -> None:
        """Do nothing."""

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def has_requests(self) -> bool:
        return False

    def drop_keys_values(self) -> None:
        """Do nothing: the decoder of layouts forgets its own at the end of each pause."""

    def free_cache(self) -> None:
        """Do nothing: the decoder of layouts frees its own at the end of each pause."""

    def restore_cache(self) -> None:
        """Do nothing: the cache grows as it is used."""

    def release_weights(self) -> None:
        """Do nothing: the decoder reads the model's parameters."""

    def bind_weights(self) -> None:
        """Do nothing: the decoder reads the model's parameters."""


def check_vision_options(config: TransformersConfig) -> None:
    """Raise `ConfigError` for an option that a vision-language model cannot have."""
    plain = TransformersConfig()
    for name in _UNUSED:
        if getattr(config, name) != getattr(plain, name):
            raise ConfigError(
                f"engine.{name} is {getattr(config, name)!r}, which a vision-language model cannot have: it has the"
                " decoder of layouts, whose size is engine.layout_cache_tokens"
            )
    if config.product_dtype != "float32":
        raise ConfigError(
            f"engine.product_dtype is {config.product_dtype!r}, which a vision-language model cannot have"
        )
