"""
Trains the start model of the training example from scratch on a CPU, in three minutes on one core.

The demonstrations have one to eight paths and are trained under the layout of sampling, as in `demo.train`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from attrs import frozen

from turnwise_parallel_thinking.demo.halves import LEFT_SHARE, generate_problems, write_demonstration
from turnwise_parallel_thinking.demo.train import collate, generate_records, train_tokenizer
from turnwise_tiny_models import FitConfig, Training, batched, tiny_qwen3, train_command

_MOST_PATHS: Final = 8


@frozen
class TrainConfig(FitConfig):
    """
    Options of the training.

    Attributes:
        left_share: probability that a path takes the left half, in the last demonstrations.
        balanced_steps: first steps, in which both halves are equally likely: the model learns to add both.
    """

    left_share: float = LEFT_SHARE
    balanced_steps: int = 660


_DEFAULTS: Final = TrainConfig(steps=900, batch_size=32, learning_rate=4e-3, warmup_steps=50)


def build_training(config: TrainConfig) -> Training:
    """Build tokenizer, model of about 200 thousand parameters, and batches."""
    tokenizer = train_tokenizer(islice(_generate_texts(config), 300))
    model = tiny_qwen3(tokenizer, hidden_size=64, intermediate_size=192, num_layers=3, head_dim=32)
    records = generate_records(_generate_texts(config), tokenizer)
    return Training(tokenizer, model, batched(records, config.batch_size, collate))


def _generate_texts(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yield pairs of a question and a tagged response."""
    source = random.Random(config.seed)
    for index, problem in enumerate(generate_problems("train", config.seed)):
        share = 0.5 if index < config.balanced_steps * config.batch_size else config.left_share
        num_paths = source.randint(1, _MOST_PATHS)
        yield problem.question, write_demonstration(problem, source, num_paths=num_paths, left_share=share)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; None uses the arguments of the process."""
    prog = "python -m turnwise_parallel_thinking.demo.train_halves"
    train_command(prog, "Train the start model of the training example.", _DEFAULTS, build_training, arguments)


if __name__ == "__main__":
    main()
