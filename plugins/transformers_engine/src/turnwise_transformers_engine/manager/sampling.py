"""Sampling parameters in transformers' terms."""

from __future__ import annotations

from typing import Any

from turnwise.types import SamplingParams
from turnwise_engine_support.requests import is_greedy, sampled_temperature

GENERATION_OPTIONS: dict[str, Any] = {
    # Requests can use a filter only if the manager was made with a value other than the filter's default.
    "do_sample": True,
    "temperature": 0.5,
    "top_k": 50,
    "top_p": 0.5,
    "max_new_tokens": 1,
    "eos_token_id": -1,
}


def request_options(sampling: SamplingParams, vocab_size: int) -> dict[str, float | int]:
    """
    Return the keyword arguments of `add_request`.

    The processors run in the order temperature, top-k, top-p, as in vLLM. Greedy needs both filters: top-k keeps all
    ids that tie for the best, and the smallest nucleus keeps one of these, always the same.
    """
    if is_greedy(sampling):
        return {"temperature": 1.0, "top_k": 1, "top_p": 1e-6}
    top_k = vocab_size if sampling.top_k == -1 else min(sampling.top_k, vocab_size)
    return {"temperature": sampled_temperature(sampling), "top_k": top_k, "top_p": float(sampling.top_p)}


def skip_unused_filters(manager: Any, vocab_size: int) -> None:
    """
    Skip top-k and top-p in batches in which no request uses them.

    Both sort the whole vocabulary at every step. On a CPU with 150,000 ids that is four times the cost of the rest. A
    captured or compiled step always repeats its first run, so there the filters stay.
    """
    config = manager.continuous_batching_config
    if any(config.cuda_graph_booleans) or config.varlen_compile_config or config.decode_compile_config:
        return
    from transformers.generation.continuous_batching.cb_logits_processors import (
        ContinuousBatchingTopKLogitsWarper,
        ContinuousBatchingTopPLogitsWarper,
    )

    processors = manager.logit_processor.logits_processor
    neutral: dict[Any, float] = {
        ContinuousBatchingTopKLogitsWarper: vocab_size,
        ContinuousBatchingTopPLogitsWarper: 1.0,
    }
    for index, processor in enumerate(processors):
        if type(processor) in neutral:
            processors[index] = _make_skippable(processor, neutral[type(processor)])


def _make_skippable(processor: Any, neutral: float) -> Any:
    """Return a processor that does nothing if every request of the batch has the neutral value."""
    (name,) = processor.supported_kwargs

    class Skippable(type(processor)):  # type: ignore[misc]  # a base known at run time only
        """Decides on the host, while a step is prepared, whether the step has anything to filter."""

        in_use = True

        def prepare_tensor_args(self, requests: list[Any]) -> Any:
            self.in_use = any(each.state.logit_processor_kwargs.get(name) != neutral for each in requests)
            return super().prepare_tensor_args(requests)

        def __call__(self, scores: object, tensor_arg: object) -> Any:
            return super().__call__(scores, tensor_arg) if self.in_use else scores

    return Skippable(processor)
