"""Trains a model on demonstrations with cross entropy."""

# ruff: noqa: T201 - the progress of a command

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, TypeVar

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerFast

IGNORE_INDEX: Final = -100
"""Target of tokens outside the loss; the default of torch's `cross_entropy`."""

T = TypeVar("T")

Demonstration = tuple[Sequence[int], Sequence[bool]]
"""Token ids and, in a second sequence of the same length, whether the model writes each token."""

Batch = tuple[Mapping[str, Tensor], Tensor]
"""The model's keyword arguments, and (B, T) targets: token ids or `IGNORE_INDEX`."""


@frozen
class FitConfig:
    """
    Hyperparameters of a training.

    Attributes:
        steps: optimizer steps.
        batch_size: demonstrations per step.
        learning_rate: peak learning rate, reached after the warm-up.
        warmup_steps: steps of the linear warm-up.
        seed: seed of weights and data.
    """

    steps: int = 1000
    batch_size: int = 32
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    seed: int = 0


@frozen(eq=False)
class Training:
    """
    A model with its tokenizer and its training data.

    Attributes:
        tokenizer: the model's tokenizer.
        model: trained in place.
        batches: at least one batch per step.
    """

    tokenizer: PreTrainedTokenizerFast
    model: PreTrainedModel
    batches: Iterator[Batch]


def pad_demonstrations(demonstrations: Sequence[Demonstration]) -> Batch:
    """Collate demonstrations into a batch, padded on the right with id 0 and without an attention mask."""
    # Under the causal mask no real token attends to padding on its right, so no attention mask is needed.
    length = max(len(ids) for ids, _mask in demonstrations)
    inputs = torch.zeros(len(demonstrations), length, dtype=torch.long)
    targets = torch.full((len(demonstrations), length), IGNORE_INDEX)
    for row, (ids, mask) in enumerate(demonstrations):
        inputs[row, : len(ids)] = torch.tensor(ids)
        targets[row, : len(ids)] = torch.where(torch.tensor(mask), inputs[row, : len(ids)], IGNORE_INDEX)
    return {"input_ids": inputs}, targets


def batched(demonstrations: Iterator[T], size: int, collate: Callable[[Sequence[T]], Batch]) -> Iterator[Batch]:
    """Yield batches of `size` items, each built by `collate`; an incomplete last batch is dropped."""
    while len(some := list(islice(demonstrations, size))) == size:
        yield collate(some)


def fit(training: Training, config: FitConfig) -> None:
    """
    Train the model and print progress.

    AdamW minimizes the mean cross entropy of the tokens that the model writes.
    """
    from transformers import get_cosine_schedule_with_warmup  # takes half a second to import

    model = training.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, config.warmup_steps, config.steps)
    started = time.perf_counter()
    model.train()
    for step in range(1, config.steps + 1):
        inputs, targets = next(training.batches)
        logits = model(**inputs, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORE_INDEX)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == config.steps:
            elapsed_s = time.perf_counter() - started
            print(f"step {step:5d}/{config.steps}  loss {loss.item():.4f}  {elapsed_s:6.1f} s", flush=True)
