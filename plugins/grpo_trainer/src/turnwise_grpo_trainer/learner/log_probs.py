"""
Log-probabilities and entropies of tokens, without a whole vocabulary of logits for every token at once.

The float32 logits of 16,384 tokens and a vocabulary of 152,000 take 9.3 GiB. With a chunk size, the model's forward
pass ends before the output head; head, softmax and entropy are computed for one chunk of tokens at a time, and again in
the backward pass.
"""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from turnwise.errors import ConfigError
from turnwise_grpo_trainer.learner.lora import BaseModel
from turnwise_grpo_trainer.learner.micro_batches import MicroBatch
from turnwise_grpo_trainer.learner.models import run_model

Entropy = Literal["none", "value", "gradient"]
"""Whether entropies are computed, and whether they have a gradient."""


def token_log_probs(
    model: Any,
    micro: MicroBatch,
    temperature: float,
    *,
    entropy: Entropy = "none",
    chunk: int | None = None,
    labels: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """
    Return the log-probability of every token in the loss, under the distribution that it was sampled from.

    Args:
        model: a causal model.
        micro: M tokens are in the loss.
        temperature: sampling temperature; the logits are divided by it.
        entropy: whether to compute the entropies, too.
        chunk: most tokens whose logits are in memory at once; None takes all columns at once.
        labels: (M, K) int64, several ids in the place of each token; None is the token itself.

    Returns:
        (M,) float32, or (M, K) with `labels`; and (M,) entropies or None.

    Raises:
        ConfigError: the chunks need the logits of the model's output head, and the model changes them afterwards.
    """
    with _in_use(model) as model:
        return _token_log_probs(model, micro, temperature, entropy, chunk, micro.labels if labels is None else labels)


def _token_log_probs(
    model: Any, micro: MicroBatch, temperature: float, entropy: Entropy, chunk: int | None, labels: Tensor
) -> tuple[Tensor, Tensor | None]:
    columns = micro.input_ids.shape[0] * len(micro.keep)
    if chunk is None or columns <= chunk:
        output = run_model(model, micro, logits_to_keep=micro.keep)
        return _score(output.logits[micro.predictors[0], micro.predictors[1]], labels, temperature, entropy)
    head = model.get_output_embeddings()
    hidden = _hidden_states(model, head, micro)[micro.predictors[0], micro.predictors[1]]

    def score(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        return _score(head(states), ids, temperature, entropy)

    pieces = list(zip(torch.split(hidden, chunk), torch.split(labels, chunk), strict=True))
    if len(pieces) == 1 or not torch.is_grad_enabled():
        scores = [score(*piece) for piece in pieces]
    else:
        # The backward pass computes the head again, and has to draw the same dropout.
        draws = _has_dropout(head)
        scores = [checkpoint(score, *piece, use_reentrant=False, preserve_rng_state=draws) for piece in pieces]
    log_probs = torch.cat([each for each, _ in scores])
    return log_probs, None if entropy == "none" else torch.cat([each for _, each in scores if each is not None])


@torch.no_grad()
def measure_logits(
    model: Any, micro: MicroBatch, measure: Callable[[Tensor, Tensor], Sequence[Tensor]], *, chunk: int | None = None
) -> list[Tensor]:
    """
    Return what a function finds in the logits of the tokens in the loss, chunk by chunk and without a gradient.

    Args:
        model: a causal model.
        micro: M tokens are in the loss.
        measure: gets (m, V) logits in the model's type and (m,) labels of a chunk, and returns tensors of m entries.
        chunk: as in `token_log_probs`.

    Returns:
        The tensors of `measure`, each for all M tokens; errors as in `token_log_probs`.
    """
    rows, places = micro.predictors
    with _in_use(model) as model:
        if chunk is None or micro.input_ids.shape[0] * len(micro.keep) <= chunk:
            logits = run_model(model, micro, logits_to_keep=micro.keep).logits
            return list(measure(logits[rows, places], micro.labels))
        head = model.get_output_embeddings()
        hidden = _hidden_states(model, head, micro)[rows, places]
        pieces = zip(torch.split(hidden, chunk), torch.split(micro.labels, chunk), strict=True)
        found = [measure(head(states), labels) for states, labels in pieces]
    return [torch.cat(each) for each in zip(*found, strict=True)]


def _in_use(model: Any) -> AbstractContextManager[Any]:
    """Return a context with a model whose modules compute with its weights, also outside of its forward pass."""
    return model.adapters_off() if isinstance(model, BaseModel) else nullcontext(model)


def _has_dropout(head: nn.Module) -> bool:
    return any(isinstance(each, nn.Dropout) and each.training and each.p > 0 for each in head.modules())


def _score(logits: Tensor, labels: Tensor, temperature: float, entropy: Entropy) -> tuple[Tensor, Tensor | None]:
    """Return (M,) or (M, K) log-probabilities of labels, and (M,) entropies, from (M, V) logits."""
    scaled = logits.float() if temperature == 1 else logits.float() / temperature
    each = scaled.log_softmax(-1)
    del logits, scaled  # each is as large as the logits of a chunk
    log_probs = each.gather(-1, labels) if labels.ndim > 1 else each.gather(-1, labels[:, None]).squeeze(-1)
    if entropy == "none":
        return log_probs, None
    if entropy == "gradient":
        return log_probs, -(each.exp() * each).sum(-1)
    return log_probs, -each.detach().exp().mul_(each.detach()).sum(-1)


def _hidden_states(model: object, head: nn.Module, micro: MicroBatch) -> Tensor:
    """Return (b, C, H) the inputs of the output head, on the columns that predict a token."""
    with _shortened(head) as (inputs, outputs):
        logits = run_model(model, micro, logits_to_keep=micro.keep).logits
    # The head computed one token. If the model scales or caps its logits, they differ from the head's output.
    own, final = (each.detach().float().nan_to_num() for each in (outputs[0], logits))  # NaN equals nothing
    if not torch.equal(own, final):
        raise ConfigError(
            f"train.policy.logits_mib: {type(model).__name__} changes the logits of its output head; set it to 0"
        )
    # FSDP prepares the backward pass when a gradient reaches the model's output, so the result must depend on it.
    hidden: Tensor = inputs[0] + logits[:0].sum()
    return hidden


@contextmanager
def _shortened(head: nn.Module) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Collect a head's inputs and outputs during the body, in which it computes the first token only."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def shorten(_head: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        inputs.append(arguments[0])
        return (arguments[0][:1, :1],)

    def keep(_head: nn.Module, _arguments: tuple[Tensor, ...], output: Tensor) -> None:
        outputs.append(output)

    hooks = [head.register_forward_pre_hook(shorten), head.register_forward_hook(keep)]
    try:
        yield inputs, outputs
    finally:
        for hook in hooks:
            hook.remove()


def token_values(critic: object, micro: MicroBatch) -> Tensor:
    """Return (M,) float32 the critic's value of the state in which each token was sampled."""
    output = run_model(critic, micro).logits.squeeze(-1).float()
    values: Tensor = output[micro.predictors[0], micro.keep[micro.predictors[1]]]
    return values
