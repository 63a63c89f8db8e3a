"""
LoRA adapters (arXiv:2106.09685), merged into the weights: W = W0 + B A.

Decoding costs the same as without adapters, and every backend can serve them. The weights W0 of adapted modules are
kept, so that each update starts from them and rounding does not accumulate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from attrs import define, field

from turnwise.errors import EngineError

_PARTS: Final = (".lora_A.weight", ".lora_B.weight")


def adapted_weight(name: str) -> str | None:
    """Return the name of the weight that an adapter changes; None if a name is not of an adapter."""
    part = next((part for part in _PARTS if name.endswith(part)), None)
    return None if part is None else f"{name.removesuffix(part)}.weight"


@define(eq=False)
class AdapterMerger:
    """
    Merges adapters into the weights of a model.

    Attributes:
        bases: W0 of each module that has an adapter, by the name of its weight; in host memory.
    """

    bases: dict[str, Any] = field(factory=dict)

    def merge(
        self, staged: Iterable[tuple[str, object]], targets: Mapping[str, object], missing: Collection[str]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """
        Return the weights to write for an update that may have adapters, and the `bases` after it; change nothing.

        Args:
            staged: names and new tensors in host memory.
            targets: the model's weights, by name.
            missing: names of weights that have no valid value.

        Raises:
            EngineError: half an adapter, shapes that do not fit, or a module whose weight is missing.
        """
        import torch

        plain: dict[str, Any] = {}
        adapters: dict[str, dict[str, Any]] = {}
        for name, tensor in staged:
            weight = adapted_weight(name)
            if weight is None:
                plain[name] = tensor
            else:
                adapters.setdefault(weight, {})[name.removeprefix(weight.removesuffix(".weight"))] = tensor
        bases = {name: base for name, base in self.bases.items() if name not in plain}
        for name, parts in adapters.items():
            if absent := [part for part in _PARTS if part not in parts]:
                raise EngineError(f"the adapter of {name!r} has no {absent[0].removeprefix('.')}")
            if name in missing and name not in plain and name not in bases:
                raise EngineError(f"the engine has no {name!r} to adapt since sleep level 2: send whole weights first")
            into, out = (parts[part].float() for part in _PARTS)
            _check_shapes(name, into, out, targets[name])
            if name not in bases:
                bases[name] = plain.get(name, targets[name]).detach().to("cpu", copy=True)
            plain[name] = torch.addmm(bases[name].float(), out, into)
        return plain, bases


def _check_shapes(name: str, into: Any, out: Any, weight: Any) -> None:
    shapes, fitting = (tuple(into.shape), tuple(out.shape)), tuple(weight.shape)
    rank = len(into)
    if shapes != ((rank, fitting[-1]), (fitting[0], rank)):
        raise EngineError(f"the adapter of {name!r} has the shapes {shapes}, which do not fit {fitting}")
