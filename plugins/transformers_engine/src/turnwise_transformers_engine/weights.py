"""New weights under a manager that is at work: checked first, then all or none, and no key or value of the old ones."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from turnwise.errors import EngineError


def swap_weights(manager: Any, weights: Iterable[tuple[str, Any]], on_swapped: Callable[[Iterable[str]], None]) -> None:
    """
    Replace weights by name, in place, between two steps of the manager. Blocks until a step has ended.

    All of them are copied to host memory before the first is written: a source that breaks off changes nothing.

    Args:
        manager: the running manager.
        weights: names of the model's state dict, and arrays or tensors of the same shapes; a part of them is fine.
        on_swapped: called with the names before the next step begins.

    Raises:
        EngineError: a name that the model has not, another shape, or whatever the source raised; nothing was changed.
        RuntimeError: the manager's thread has ended.
    """
    torch = importlib.import_module("torch")
    targets = manager.model.state_dict()
    for spec in getattr(weights, "specs", ()):
        _target(targets, spec.name, spec.shape)
    staged = list(_staged(weights, targets, torch))
    with manager.pause(), torch.no_grad():
        for name, tensor in staged:
            targets[name].copy_(tensor)
        _forget_keys_and_values(manager.batch_processor)
        on_swapped([name for name, _tensor in staged])


def _staged(weights: Iterable[tuple[str, Any]], targets: Mapping[str, Any], torch: Any) -> Iterator[tuple[str, Any]]:
    """Yield copies of the weights that fit the model."""
    try:
        for name, array in weights:
            _target(targets, name, array.shape)
            yield name, _as_tensor(name, array, torch)
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"cannot update the weights: {type(error).__name__}: {error}") from error


def _target(targets: Mapping[str, Any], name: str, shape: Sequence[int]) -> None:
    if name not in targets:
        close = difflib.get_close_matches(name, targets, n=1)
        raise EngineError(f"the model has no weight {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    expected = tuple(targets[name].shape)
    if tuple(shape) != expected:
        raise EngineError(f"weight {name!r} has shape {expected}, got {tuple(shape)}")


def _as_tensor(name: str, array: Any, torch: Any) -> Any:
    """Return a copy in host memory."""
    if isinstance(array, torch.Tensor):
        if not array.is_floating_point():
            raise EngineError(f"weight {name!r} must be of floating point, got {array.dtype}")
        return array.detach().to("cpu", copy=True)
    if array.dtype.name == "bfloat16":
        # torch does not know ml_dtypes, from which numpy has its bfloat16: the bits are the same.
        return torch.tensor(array.view("int16")).view(torch.bfloat16)
    if array.dtype.kind != "f":
        raise EngineError(f"weight {name!r} must be of floating point, got {array.dtype.name}")
    return torch.tensor(array)


def _forget_keys_and_values(processor: Any) -> None:
    """
    Let every request in flight be read again from its own tokens, and empty the prefix cache.

    Eviction alone leaves the pages of requests in flight findable: the next request with their prompt would go on from
    keys and values of the old weights. This is what the manager does to a request that it has no memory for: freed
    uncached, and queued again with its tokens as a longer prompt.
    """
    scheduler, cache = processor.scheduler, processor.cache
    finished = importlib.import_module("transformers.generation.continuous_batching.requests").RequestStatus.FINISHED
    for request_id, state in list(scheduler.active_requests.items()):
        cache.free_blocks(request_id, no_cache=True)
        again = state.create_equivalent_initial_request()
        state.status = finished
        scheduler.finish_request(request_id)
        scheduler.add_waiting_request(again)
    cache.evict_cached_blocks()
