"""What the sampling parameters of a request are called in transformers, and what they cost there."""

from __future__ import annotations

import importlib
from typing import Any

from turnwise.types import SamplingParams

GENERATION_OPTIONS: dict[str, Any] = {
    # A filter exists for requests only if the manager was made with a value that is not its default.
    "do_sample": True,
    "temperature": 0.5,
    "top_k": 50,
    "top_p": 0.5,
    "max_new_tokens": 1,
    "eos_token_id": -1,
}

GREEDY_BELOW = 1e-5
"""Temperatures under this overflow the scaled logits; vLLM draws the line at the same place."""


def request_options(sampling: SamplingParams, vocab_size: int) -> dict[str, float | int]:
    """
    Return the keyword arguments of `add_request` that draw as asked.

    The processors run in the order temperature, top-k, top-p, as in vLLM. Greedy is the best id alone: top-k would keep
    all that tie with it, and the smallest nucleus then keeps one of these, always the same.
    """
    if sampling.temperature < GREEDY_BELOW:
        return {"temperature": 1.0, "top_k": 1, "top_p": 1e-6}
    top_k = vocab_size if sampling.top_k == -1 else min(sampling.top_k, vocab_size)
    return {"temperature": float(sampling.temperature), "top_k": top_k, "top_p": float(sampling.top_p)}


def skip_unused_filters(manager: Any, vocab_size: int) -> None:
    """
    Make top-k and top-p free for batches in which no request filters.

    Both sort the whole vocabulary at every step, four times the cost of all else on a CPU with 150,000 ids. A captured
    or compiled step replays what it did the first time, so there the filters stay as they are.
    """
    config = manager.continuous_batching_config
    if any(config.cuda_graph_booleans) or config.varlen_compile_config or config.decode_compile_config:
        return
    module = importlib.import_module("transformers.generation.continuous_batching.cb_logits_processors")
    processors = manager.logit_processor.logits_processor
    neutral = {
        module.ContinuousBatchingTopKLogitsWarper: vocab_size,
        module.ContinuousBatchingTopPLogitsWarper: 1.0,
    }
    for index, processor in enumerate(processors):
        if type(processor) in neutral:
            processors[index] = _skipping(processor, neutral[type(processor)])


def _skipping(processor: Any, neutral: float) -> Any:
    """Return the processor with its work left out while every request in the batch has the neutral value."""
    (name,) = processor.supported_kwargs

    class Skipping(type(processor)):  # type: ignore[misc]  # a base known at run time only
        """Knows from the preparation of a step, on the host, whether the step has anything to filter."""

        in_use = True

        def prepare_tensor_args(self, requests: list[Any]) -> Any:
            self.in_use = any(each.state.logit_processor_kwargs.get(name) != neutral for each in requests)
            return super().prepare_tensor_args(requests)

        def __call__(self, scores: Any, tensor_arg: Any) -> Any:
            return super().__call__(scores, tensor_arg) if self.in_use else scores

    return Skipping(processor)
