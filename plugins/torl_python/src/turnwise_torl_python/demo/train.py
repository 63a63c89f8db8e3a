"""
Trains the tiny model from scratch, on one CPU thread, in a few minutes.

The model first learns from demonstrations without slips to read a question and to copy numbers. Demonstrations with
slips then teach it to be wrong at known rates.

    python -m turnwise_torl_python.demo.train --out model
"""

# ruff: noqa: TID253 - a command; no hook imports it

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from attrs import frozen
from transformers import PreTrainedTokenizerFast

from turnwise_tiny_models import (
    Demonstration,
    FitConfig,
    Training,
    batched,
    byte_level_tokenizer,
    pad_demonstrations,
    tiny_qwen3,
    train_command,
)
from turnwise_torl_python.demo.encoding import encode, prompt_text
from turnwise_torl_python.demo.problems import generate_problems
from turnwise_torl_python.demo.solver import CLEAN, SHIPPED_SLIPS, NoisySolver

_VOCAB_SIZE: Final = 448
_CONTEXT_LENGTH: Final = 1024


@frozen
class TrainConfig(FitConfig):
    """
    Options of the training.

    Attributes:
        clean_share: share of the demonstrations that have no slips; they come first.
    """

    clean_share: float = 0.6


_DEFAULTS: Final = TrainConfig(steps=1200)


def build_training(config: TrainConfig) -> Training:
    """Build tokenizer, model and batches."""
    tokenizer = byte_level_tokenizer(_corpus(config), _VOCAB_SIZE, context_length=_CONTEXT_LENGTH)
    stream = demonstrations(config, tokenizer)
    return Training(tokenizer, tiny_qwen3(tokenizer), batched(stream, config.batch_size, pad_demonstrations))


def demonstrations(config: TrainConfig, tokenizer: PreTrainedTokenizerFast) -> Iterator[Demonstration]:
    """Yield an endless stream of encoded demonstrations, first without slips and then with slips."""
    source = random.Random(config.seed)
    clean, noisy = NoisySolver(CLEAN, source), NoisySolver(SHIPPED_SLIPS, source)
    num_clean = round(config.steps * config.clean_share) * config.batch_size
    for index, problem in enumerate(generate_problems("train", config.seed)):
        solver = clean if index < num_clean else noisy
        yield encode(tokenizer, problem, solver.solve(problem))


def _corpus(config: TrainConfig) -> Iterator[str]:
    """Yield questions and demonstrations, from which the tokenizer learns its merges."""
    yield "system\nuser\nassistant\n" * 50
    solver = NoisySolver(SHIPPED_SLIPS, random.Random(config.seed))
    for problem in islice(generate_problems("train", config.seed), 500):
        yield prompt_text(problem)
        for turn in solver.solve(problem):
            yield f"{turn.text}\n{turn.output}\n```\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; None uses the arguments of the process."""
    prog = "python -m turnwise_torl_python.demo.train"
    train_command(
        prog, "Train the tiny model that writes programs, from scratch on CPU.", _DEFAULTS, build_training, arguments
    )


if __name__ == "__main__":
    main()
