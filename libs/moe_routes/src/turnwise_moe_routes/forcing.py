"""
Makes the layers of a model choose given experts, with the weights that their current router gives these.

The routers of transformers choose by `topk`, and compute the weights from the scores that it returns or from its
indices. Inside the block of a layer, `topk` over all experts returns the given ones and their scores. All else is the
model's own code: softmax or sigmoid, normalisation, scale, and the gradient of the router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Final

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from turnwise_moe_routes.layers import ExpertLayer, find_expert_layers
from turnwise_moe_routes.recording import RouteRecorder
from turnwise_moe_routes.shapes import RouteShape

_TOP_K: Final = (torch.topk, Tensor.topk)


@define(eq=False)
class RouteForcer:
    """
    The layers of a model whose experts can be given.

    Attributes:
        model: of transformers; changed only during `forcing`.
        shape: of its routes.
    """

    model: nn.Module
    shape: RouteShape
    layers: tuple[ExpertLayer, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.layers = find_expert_layers(self.model)

    def check(self) -> None:
        """
        Force experts on a few tokens, and compare them with the ones that run.

        Raises:
            ValueError: the model has no such layers, or chooses its experts in another way.
        """
        if not self.layers:
            raise ValueError(f"{type(self.model).__name__} has no layers of experts whose choices can be replaced")
        device = next(self.model.parameters()).device
        ids = torch.arange(3, device=device)[None]
        spread = torch.arange(3 * self.shape.num_layers).view(1, 3, -1, 1) + torch.arange(self.shape.top_k)
        routes = (spread % self.shape.num_experts).to(device)
        recorder = RouteRecorder(self.shape)
        handles = recorder.attach(self.model)
        try:
            with torch.no_grad(), recorder.recording() as found, self.forcing(routes):
                self.model(input_ids=ids, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        for layer in self.layers:
            indices = found.indices[layer.number].view(3, self.shape.top_k)
            if not torch.equal(indices, routes[0, :, layer.number]):
                raise ValueError(f"{layer.name} does not run the experts that its router is given")

    @contextmanager
    def forcing(self, routes: Tensor) -> Iterator[None]:
        """
        Replace the choices of the body's forward passes, and of what its backward passes compute again.

        Args:
            routes: (b, L, num_layers, top_k) integers for b rows of L tokens. In a layer where one of a token's is
                negative, the router chooses.
        """
        with ExitStack() as stack:
            for layer in self.layers:
                own = routes[:, :, layer.number].reshape(-1, self.shape.top_k)
                stack.enter_context(_replaced_forward(layer, self.shape, own))
            yield


@contextmanager
def _replaced_forward(layer: ExpertLayer, shape: RouteShape, routes: Tensor) -> Iterator[None]:
    """Run the block of a layer with given choices. It is the block's own attribute: no copy or thread keeps it."""
    own = vars(layer.block).get("forward")
    inner: Callable[..., Any] = layer.block.forward

    @wraps(inner)
    def forward(*arguments: object, **options: object) -> Any:
        with _Choice(shape, routes) as choice:
            result = inner(*arguments, **options)
        if not choice.is_made:
            raise RuntimeError(f"{layer.name} chose no experts by topk, so they cannot be replaced")
        return result

    layer.block.forward = forward
    try:
        yield
    finally:
        if own is None:
            del layer.block.forward
        else:
            layer.block.forward = own


class _Choice(TorchFunctionMode):
    """Replaces the result of the first `topk` over all experts."""

    def __init__(self, shape: RouteShape, routes: Tensor) -> None:
        super().__init__()
        self.is_made = False
        self._shape, self._routes = shape, routes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_made or func not in _TOP_K:
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        if scores.shape[-1] != self._shape.num_experts or result.indices.shape[-1] != self._shape.top_k:
            return result  # of groups of experts
        self.is_made = True
        given = self._routes.to(result.indices).view(result.indices.shape)
        chosen = torch.where((given >= 0).all(-1, keepdim=True), given, result.indices)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))
