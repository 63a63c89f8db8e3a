"""Weight updates of a running backend: all or none, and no key or value of the old weights stays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from turnwise.errors import EngineError
from turnwise.weights.sources import as_tensor
from turnwise_engine_support.error_lines import error_line
from turnwise_engine_support.weight_checks import ExpectedWeights, check_dtype
from turnwise_transformers_engine.adapters import adapted_weight
from turnwise_transformers_engine.memory_state import MemoryState, finish_writes


def swap_weights(
    weights: Iterable[tuple[str, Any]],
    version: int,
    memory: MemoryState,
    on_swapped: Callable[[Iterable[str], bool], None],
) -> None:
    """
    Replace weights by name, in place, between two steps of the backend. Blocks until a step has ended.

    All weights are copied to host memory before the first is written, so a failing source changes nothing.

    Args:
        weights: names of the model's state dict, or some of them, with arrays or tensors of the same shapes; or
            adapters, see `Engine.update_weights`.
        version: of the new weights.
        memory: of the running backend.
        on_swapped: called before the next step starts, with the names, and whether requests have recorded the version.

    Raises:
        EngineError: a name that the model does not have, a wrong shape, or an error of the source; nothing was changed.
        RuntimeError: the backend's thread has ended.
    """
    import torch

    backend, merger = memory.backend, memory.adapters
    targets = backend.model.state_dict()
    expected = ExpectedWeights({name: tuple(tensor.shape) for name, tensor in targets.items()})
    for spec in getattr(weights, "specs", ()):
        _check(spec.name, spec.shape, expected)
    merged, bases = merger.merge(_stage(weights, expected), targets, memory.missing)
    with backend.paused(), torch.no_grad():
        for name, tensor in merged.items():
            targets[name].copy_(tensor)
        finish_writes(backend.model.device)
        merger.bases = bases
        recorded = backend.drop_keys_values(version)
        on_swapped(merged, recorded)


def _check(name: str, shape: Sequence[int], expected: ExpectedWeights) -> None:
    """Check a weight, or the module of an adapter, whose shapes are checked when it is complete."""
    adapted = adapted_weight(name)
    if adapted is None:
        expected.check(name, shape)
    else:
        expected.check(adapted, expected.shapes.get(adapted, ()))


def _stage(weights: Iterable[tuple[str, Any]], expected: ExpectedWeights) -> Iterator[tuple[str, Any]]:
    """Yield copies of the weights in host memory."""
    import torch

    try:
        for name, weight in weights:
            _check(name, weight.shape, expected)
            check_dtype(name, str(weight.dtype).removeprefix("torch."))
            tensor = as_tensor(weight, torch)
            # `as_tensor` has copied an array already.
            yield name, tensor.detach().to("cpu", copy=True) if tensor is weight else tensor
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"cannot read the new weights: {error_line(error)}") from error
