"""Records the experts that the layers of a model choose in a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from attrs import define, field
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from turnwise_moe_routes.layers import find_expert_layers
from turnwise_moe_routes.shapes import Routes, RouteShape

_RUNNING: ContextVar[dict[int, Tensor] | None] = ContextVar("running", default=None)
"""Indices by layer of the forward pass of this thread; several threads may run copies of one model."""


@define(eq=False)
class Recording:
    """
    The experts of a forward pass.

    Attributes:
        shape: of the model's routes.
        indices: (N, top_k) by layer, on the device of the model.
    """

    shape: RouteShape
    indices: dict[int, Tensor] = field(factory=dict)

    def routes(self) -> Routes:
        """Return (N, num_layers, top_k), with the tokens of several rows one row after the other; a device waits."""
        numbers = sorted(self.indices)
        stacked = torch.stack([self.indices[each].reshape(-1, self.shape.top_k) for each in numbers], 1)
        values = stacked.to(torch.int16).cpu().numpy()
        whole = self.shape.unknown(len(values))
        whole[:, np.array(numbers)] = values
        return whole


@define(eq=False)
class RouteRecorder:
    """
    Hooks on the experts of a model, and of its copies; without a running recording they do nothing.

    Attributes:
        shape: of the model's routes.
    """

    shape: RouteShape

    def attach(self, model: nn.Module) -> list[RemovableHandle]:
        """Add the hooks and return them; `ValueError` for a model without layers of experts that can be recorded."""
        layers = find_expert_layers(model)
        if not layers:
            raise ValueError(f"{type(model).__name__} has no layers of experts whose choices can be read")
        return [layer.experts.register_forward_pre_hook(_make_hook(layer.number)) for layer in layers]

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Record the forward pass of the body."""
        found = Recording(self.shape)
        token = _RUNNING.set(found.indices)
        try:
            yield found
        finally:
            _RUNNING.reset(token)


def record_routes(model: Any, token_ids: Sequence[int] | NDArray[np.int32], shape: RouteShape, **inputs: Any) -> Routes:
    """
    Return the routes of one forward pass.

    Args:
        model: of transformers.
        token_ids: (n,) ids of one row.
        shape: of the model's routes.
        inputs: further arguments of the pass.

    Returns:
        (n, num_layers, top_k).
    """
    recorder = RouteRecorder(shape)
    handles = recorder.attach(model)
    try:
        with torch.no_grad(), recorder.recording() as found:
            model(input_ids=torch.tensor([[*map(int, token_ids)]]), use_cache=False, **inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found.routes()


def _make_hook(number: int) -> Callable[..., None]:
    # A function, which a deep copy of the model shares.
    def note(_experts: nn.Module, arguments: tuple[Any, ...]) -> None:
        running = _RUNNING.get()
        if running is not None:
            running[number] = arguments[1]

    return note
