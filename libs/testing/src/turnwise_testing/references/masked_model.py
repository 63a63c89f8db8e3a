"""
The truth about turns under a grammar: a forward pass of transformers, masked by another function of llguidance.

Needs llguidance, torch and transformers, which are imported when a function is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.types import GenerateRequest


def masked_logprobs(
    model: Any, tokenizer: Any, request: GenerateRequest, token_ids: Sequence[int], *, top_p: float | None = None
) -> NDArray[np.float64]:
    """
    Return the log-probabilities of a turn's ids, in the distribution without the ids that its grammar excludes.

    Args:
        model: of transformers.
        tokenizer: of transformers, fast.
        request: with a grammar; transformers has its filters.
        token_ids: (n,) ids of the turn.
        top_p: replaces the value in the request.

    Returns:
        (n,) values; -inf for an id that is excluded.
    """
    import torch
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer

    assert request.grammar is not None
    size, stops = model.config.vocab_size, list(request.sampling.stop_token_ids)
    lexicon = from_tokenizer(tokenizer, n_vocab=size)
    matcher = LLMatcher(lexicon, request.grammar.text)
    context = request.token_ids.tolist()
    matcher.consume_tokens(context[len(context) - request.grammar.num_read :])
    ids = [*context, *token_ids]
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, len(context) - 1 : -1].double()
    warp = _warper(request, top_p)
    values = []
    for token, row in zip(token_ids, logits, strict=True):
        allowed = np.zeros(size, np.bool_)
        if not matcher.is_stopped():
            allowed = np.frombuffer(matcher.compute_logit_bias(), np.uint8)[:size] > 0
        allowed[list(lexicon.eos_tokens)] = False
        allowed[stops] = matcher.is_accepting()
        masked = row.masked_fill(~torch.from_numpy(allowed), -torch.inf) / request.sampling.temperature
        values.append(float(warp(torch.tensor([ids]), masked[None])[0].log_softmax(-1)[token]))
        if not (token in stops and matcher.is_accepting()):
            matcher.consume_token(token)
    return np.array(values)


def _warper(request: GenerateRequest, top_p: float | None) -> Any:
    """Return the filters of a request, as transformers has them."""
    import transformers

    sampling, filters = request.sampling, transformers.LogitsProcessorList()
    if sampling.top_k != -1:
        filters.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        filters.append(transformers.TopPLogitsWarper(sampling.top_p if top_p is None else top_p))
    return filters
