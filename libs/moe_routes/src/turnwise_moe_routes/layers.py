"""Finds the layers of a model of transformers that have experts."""

from __future__ import annotations

import inspect
from typing import Final

from attrs import frozen
from torch import nn

_EXPERTS: Final = "experts"


@frozen(eq=False)
class ExpertLayer:
    """
    A layer with experts.

    Attributes:
        number: of the layer in the model, from 0.
        name: of the block.
        block: module that chooses experts and calls them.
        experts: module that is called with hidden states, (N, top_k) indices of experts, and their weights.
    """

    number: int
    name: str
    block: nn.Module
    experts: nn.Module


def find_expert_layers(model: nn.Module) -> tuple[ExpertLayer, ...]:
    """
    Return the layers of a model whose experts get the indices of the chosen ones.

    In transformers 5 each architecture has a module `experts`, called by the block that routes. A few older ones call
    their experts without indices; they are not found.

    Raises:
        ValueError: two of them have one number, as in a model with several stacks of layers.
    """
    modules = dict(model.named_modules())
    found: dict[int, ExpertLayer] = {}
    for name, module in modules.items():
        parent, _, leaf = name.rpartition(".")
        number = next((int(part) for part in parent.split(".") if part.isdigit()), None)
        if leaf != _EXPERTS or number is None or not _takes_indices(module):
            continue
        if number in found:
            raise ValueError(f"{found[number].name} and {parent} are both in layer {number}")
        found[number] = ExpertLayer(number, parent, modules[parent], module)
    return tuple(found.values())


def _takes_indices(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    return sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters) >= 3
