"""Weight updates of a running manager: all or none, and no key or value of the old weights stays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from turnwise.errors import EngineError
from turnwise.weights.sources import as_tensor
from turnwise_engine_support.error_lines import error_line
from turnwise_engine_support.weight_checks import ExpectedWeights, check_dtype


def swap_weights(manager: Any, weights: Iterable[tuple[str, Any]], on_swapped: Callable[[Iterable[str]], None]) -> None:
    """
    Replace weights by name, in place, between two steps of the manager. Blocks until a step has ended.

    All weights are copied to host memory before the first is written, so a failing source changes nothing.

    Args:
        manager: the running manager.
        weights: names of the model's state dict, or some of them, with arrays or tensors of the same shapes.
        on_swapped: called with the names before the next step starts.

    Raises:
        EngineError: a name that the model does not have, a wrong shape, or an error of the source; nothing was changed.
        RuntimeError: the manager's thread has ended.
    """
    import torch

    targets = manager.model.state_dict()
    expected = ExpectedWeights({name: tuple(tensor.shape) for name, tensor in targets.items()})
    for spec in getattr(weights, "specs", ()):
        expected.check(spec.name, spec.shape)
    staged = list(_stage(weights, expected))
    with manager.pause(), torch.no_grad():
        for name, tensor in staged:
            targets[name].copy_(tensor)
        _forget_keys_and_values(manager.batch_processor)
        on_swapped([name for name, _tensor in staged])


def _stage(weights: Iterable[tuple[str, Any]], expected: ExpectedWeights) -> Iterator[tuple[str, Any]]:
    """Yield copies of the weights in host memory."""
    import torch

    try:
        for name, weight in weights:
            expected.check(name, weight.shape)
            check_dtype(name, str(weight.dtype).removeprefix("torch."))
            tensor = as_tensor(weight, torch)
            # `as_tensor` has copied an array already.
            yield name, tensor.detach().to("cpu", copy=True) if tensor is weight else tensor
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"cannot read the new weights: {error_line(error)}") from error


def _forget_keys_and_values(processor: Any) -> None:
    """
    Return every request in flight to the queue, to be prefilled again, and empty the prefix cache.

    Eviction alone would keep the pages of requests in flight: the next request with their prompt would continue from
    keys and values of the old weights. So they get what the manager does to a request that it has no memory for: their
    pages are freed, and they are queued again with their tokens as a longer prompt.
    """
    from transformers.generation.continuous_batching.requests import RequestStatus

    scheduler, cache = processor.scheduler, processor.cache
    for request_id, state in list(scheduler.active_requests.items()):
        cache.free_blocks(request_id, no_cache=True)
        again = state.create_equivalent_initial_request()
        state.status = RequestStatus.FINISHED
        scheduler.finish_request(request_id)
        scheduler.add_waiting_request(again)
    cache.evict_cached_blocks()
