"""Checks of a request before a wrapped engine sees it: engines crash on some of these instead of refusing them."""

from __future__ import annotations

from collections.abc import Container

from turnwise.errors import EngineError
from turnwise.types import GenerateRequest, SamplingParams

GREEDY_BELOW = 1e-5
"""Lower temperatures are greedy: they would overflow the scaled logits. vLLM and SGLang use the same limit."""
HOTTEST = 1e30
"""Higher temperatures give the same uniform distribution. As an infinite float32 they would make masked ids NaN."""


def is_greedy(sampling: SamplingParams) -> bool:
    """Return whether the most likely id is taken at every step."""
    return sampling.temperature < GREEDY_BELOW


def sampled_temperature(sampling: SamplingParams) -> float:
    """Return the number that divides the logits of a request: 1 if it is greedy, and at most `HOTTEST`."""
    return 1.0 if is_greedy(sampling) else min(float(sampling.temperature), HOTTEST)


def check_not_in_flight(request: GenerateRequest, in_flight: Container[str]) -> None:
    """Raise `EngineError` if a request with this id is running: `abort` could not tell the two apart."""
    if request.request_id in in_flight:
        raise EngineError(f"request {request.request_id!r} is in flight already")


def check_context(
    request: GenerateRequest, *, max_context: int | None, vocab_size: int | None = None, reads_pictures: bool = False
) -> None:
    """
    Raise `EngineError` for a context that cannot be continued.

    Args:
        request: the request.
        max_context: most tokens of context and output together; None if only the server knows.
        vocab_size: number of ids that the model can read; None if only the server knows.
        reads_pictures: whether the engine takes requests with pictures.
    """
    num_context = len(request.token_ids)
    if num_context == 0:
        raise EngineError(f"request {request.request_id!r} has an empty context")
    if max_context is not None and num_context >= max_context:
        raise EngineError(
            f"request {request.request_id!r} has a context of {num_context} tokens: max_context is {max_context},"
            " output included"
        )
    if request.pictures and not reads_pictures:
        raise EngineError(
            f"request {request.request_id!r} has {len(request.pictures)} pictures, which this engine does not read"
        )
    if vocab_size is not None and (request.token_ids.min() < 0 or request.token_ids.max() >= vocab_size):
        raise EngineError(f"request {request.request_id!r} has ids outside the vocabulary of {vocab_size}")


def num_new_tokens(request: GenerateRequest, max_context: int) -> int:
    """Return the most tokens to sample: `max_tokens` of the request, limited by the space after its context."""
    space = max_context - len(request.token_ids)
    return min(request.sampling.max_tokens or space, space)


def check_grammar(request: GenerateRequest, min_tokens: str) -> None:
    """
    Raise `EngineError` for a request with a grammar that could leave no id to sample.

    Args:
        request: with a grammar.
        min_tokens: the engine's option for the fewest tokens of a turn.
    """
    if not request.sampling.stop_token_ids:
        raise EngineError("a request with a grammar needs stop_token_ids, or its turn could not end")
    if min_tokens in request.sampling.extra:
        raise EngineError(f"a request with a grammar cannot have {min_tokens}: its text may have to end before")
