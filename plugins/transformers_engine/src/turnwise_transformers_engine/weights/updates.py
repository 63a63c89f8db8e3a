"""Weight updates of a running backend: all or none, and no key or value of the old weights stays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attrs import frozen

from turnwise.errors import EngineError, TornWeightsError
from turnwise.weights.sources import as_tensor
from turnwise_engine_support.error_lines import error_line
from turnwise_engine_support.weight_checks import ExpectedWeights, check_dtype
from turnwise_transformers_engine.weights.adapters import adapted_weight
from turnwise_transformers_engine.weights.memory_state import MemoryState, finish_writes


@frozen(eq=False)
class StagedUpdate:
    """
    New weights in host memory, checked and complete.

    Attributes:
        weights: new tensors by name, with their adapters merged in.
        bases: W0 of each adapted module after the update, by the name of its weight.
    """

    weights: dict[str, Any]
    bases: dict[str, Any]


def stage_update(weights: Iterable[tuple[str, object]], memory: MemoryState) -> StagedUpdate:
    """
    Copy weights to host memory, so that a failing source changes nothing. Blocks until all are copied.

    After sleep at level 2 there is nothing to protect: whole weights then go to the memory of the model at once, which
    saves a copy of all of them, and nothing is served before the last one.

    Args:
        weights: names of the model's state dict, or some of them, with arrays or tensors of the same shapes; or
            adapters, see `Engine.update_weights`.
        memory: of the running backend.

    Raises:
        EngineError: a name that the model does not have, a wrong shape, or an error of the source.
    """
    targets = memory.backend.model.state_dict()
    expected = ExpectedWeights({name: tuple(tensor.shape) for name, tensor in targets.items()})
    for spec in getattr(weights, "specs", ()):
        _check(spec.name, spec.shape, expected)
    specs = getattr(weights, "specs", ())
    if memory.is_empty and specs and not any(adapted_weight(spec.name) for spec in specs):
        return StagedUpdate(dict(_fill(weights, expected, targets)), {})
    return StagedUpdate(*memory.adapters.merge(_stage(weights, expected), targets, memory.missing))


def write_update(update: StagedUpdate, version: int, memory: MemoryState) -> None:
    """
    Write staged weights in place, between two steps of the backend. Blocks until a step has ended.

    Weights, adapters, cache and version change together: no decoder runs a step before all of it is done, nor after an
    error in the middle of it.

    Raises:
        TornWeightsError: an error after the first weight was written.
        RuntimeError: the backend's thread has ended.
    """
    import torch

    backend, served = memory.backend, memory.served
    targets = backend.model.state_dict()
    with backend.paused(), torch.no_grad():
        try:
            for name, tensor in update.weights.items():
                targets[name].copy_(tensor)
            finish_writes(backend.model.device)
            backend.drop_keys_values()
            memory.adapters.bases = update.bases
            memory.mark_loaded(update.weights)
        except BaseException as error:
            memory.mark_torn(f"the weight update to version {version} failed midway: {error_line(error)}")
            raise TornWeightsError(served.torn) from error
        served.version = version
        if not memory.missing:
            served.torn = ""


def _check(name: str, shape: Sequence[int], expected: ExpectedWeights) -> None:
    """Check a weight, or the module of an adapter, whose shapes are checked when it is complete."""
    adapted = adapted_weight(name)
    if adapted is None:
        expected.check(name, shape)
    else:
        expected.check(adapted, expected.shapes.get(adapted, ()))


def _fill(
    weights: Iterable[tuple[str, object]], expected: ExpectedWeights, targets: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Copy the weights into the model, and yield the weights of the model."""
    for name, tensor, _is_own in _read(weights, expected):
        yield name, targets[name].copy_(tensor.detach())


def _stage(weights: Iterable[tuple[str, object]], expected: ExpectedWeights) -> Iterator[tuple[str, Any]]:
    """Yield copies of the weights in host memory."""
    for name, tensor, is_own in _read(weights, expected):
        yield name, tensor if is_own else tensor.detach().to("cpu", copy=True)


def _read(weights: Iterable[tuple[str, Any]], expected: ExpectedWeights) -> Iterator[tuple[str, Any, bool]]:
    """Yield names and checked tensors, and whether a tensor is a copy that its source does not change later."""
    import torch

    try:
        for name, weight in weights:
            _check(name, weight.shape, expected)
            check_dtype(name, str(weight.dtype).removeprefix("torch."))
            tensor = as_tensor(weight, torch)  # copies an array
            yield name, tensor, tensor is not weight
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"cannot read the new weights: {error_line(error)}") from error
