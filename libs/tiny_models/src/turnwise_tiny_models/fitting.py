"""Learning from demonstrations."""

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
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, get_cosine_schedule_with_warmup

IGNORED: Final = -100
"""Stands among targets for what is not learned; torch's default."""

T = TypeVar("T")

Demonstration = tuple[Sequence[int], Sequence[bool]]
"""Token ids and, of the same length, whether the model writes the token."""

Batch = tuple[Mapping[str, Tensor], Tensor]
"""What the model is called with, and (B, T) targets: the ids themselves, or `IGNORED`."""


@frozen
class FitConfig:
    """
    How to train.

    Attributes:
        steps: optimizer steps.
        batch_size: demonstrations a step.
        learning_rate: the highest one, reached after the warm-up.
        warmup_steps: steps over which it rises.
        seed: of the weights and of the data.
    """

    steps: int = 1000
    batch_size: int = 32
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    seed: int = 0


@frozen(eq=False)
class Recipe:
    """
    What is trained, and on what.

    Attributes:
        tokenizer: of the model.
        model: trained in place.
        batches: at least as many as there are steps.
    """

    tokenizer: PreTrainedTokenizerFast
    model: Qwen3ForCausalLM
    batches: Iterator[Batch]


def padded(demonstrations: Sequence[Demonstration]) -> Batch:
    """Pad demonstrations on the right, where no token of theirs sees it under the causal mask."""
    length = max(len(ids) for ids, _mask in demonstrations)
    inputs = torch.zeros(len(demonstrations), length, dtype=torch.long)
    targets = torch.full((len(demonstrations), length), IGNORED)
    for row, (ids, mask) in enumerate(demonstrations):
        inputs[row, : len(ids)] = torch.tensor(ids)
        targets[row, : len(ids)] = torch.where(torch.tensor(mask), inputs[row, : len(ids)], IGNORED)
    return {"input_ids": inputs}, targets


def batched(demonstrations: Iterator[T], size: int, collate: Callable[[Sequence[T]], Batch]) -> Iterator[Batch]:
    """Yield batches of a stream, made by `padded` or another function; a last one that is not full is left out."""
    while len(some := list(islice(demonstrations, size))) == size:
        yield collate(some)


def fit(recipe: Recipe, config: FitConfig) -> None:
    """Train the model on the mean cross entropy of what it writes, and print the progress."""
    model = recipe.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, config.warmup_steps, config.steps)
    started = time.perf_counter()
    model.train()
    for step in range(1, config.steps + 1):
        inputs, targets = next(recipe.batches)
        logits = model(**inputs, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == config.steps:
            elapsed_s = time.perf_counter() - started
            print(f"step {step:5d}/{config.steps}  loss {loss.item():.4f}  {elapsed_s:6.1f} s", flush=True)
