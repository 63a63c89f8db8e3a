"""New weights under a manager that is at work: checked first, then all or none, and no key or value of the old ones."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from turnwise.errors import EngineError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def swap_weights(
    manager: Any, weights: Iterable[tuple[str, NDArray[np.generic]]], on_swapped: Callable[[], None]
) -> None:
    """
    Replace weights by name, in place, between two steps of the manager. Blocks until a step has ended.

    Args:
        manager: the running manager.
        weights: names of the model's state dict, and arrays of the same shapes; a part of them is fine.
        on_swapped: called before the next step begins.

    Raises:
        EngineError: a name that the model has not, or another shape; nothing was changed.
        RuntimeError: the manager's thread has ended.
    """
    torch = importlib.import_module("torch")
    targets = manager.model.state_dict()
    checked = [(_target(targets, name, array), array) for name, array in weights]
    with manager.pause(), torch.no_grad():
        for target, array in checked:
            target.copy_(_as_tensor(array, torch))
        _forget_keys_and_values(manager.batch_processor)
        on_swapped()


def _target(targets: dict[str, Any], name: str, array: NDArray[np.generic]) -> Any:
    if name not in targets:
        close = difflib.get_close_matches(name, targets, n=1)
        raise EngineError(f"the model has no weight {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    target = targets[name]
    if tuple(array.shape) != tuple(target.shape):
        raise EngineError(f"weight {name!r} has shape {tuple(target.shape)}, got {tuple(array.shape)}")
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise EngineError(f"weight {name!r} must be of floating point, got {array.dtype.name}")
    return target


def _as_tensor(array: NDArray[np.generic], torch: Any) -> Any:
    # torch does not know ml_dtypes, from which numpy has its bfloat16: the bits are the same.
    if array.dtype.name == "bfloat16":
        return torch.tensor(array.view("int16")).view(torch.bfloat16)
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
