"""
Trains the demo model from scratch on a CPU. It took 26 minutes on two cores that did much else at the time.

Demonstrations are tagged texts. `demonstrations.trajectory_of` makes records of them, and the model is trained under
their layout: the positions and the visibility that it is sampled with.
"""

# ruff: noqa: TID253 - a command; no hook imports it

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

import numpy as np
import torch
from attrs import asdict, frozen
from transformers import PreTrainedTokenizerFast

from turnwise import Trajectory
from turnwise.layout import visible_keys
from turnwise_parallel_thinking.config import Tags
from turnwise_parallel_thinking.demo.sums import demonstration, problems
from turnwise_parallel_thinking.demonstrations import trajectory_of
from turnwise_tiny_models import (
    IGNORED,
    Batch,
    FitConfig,
    Recipe,
    batched,
    byte_level_tokenizer,
    tiny_qwen3,
    train_command,
)

_VOCAB_SIZE: Final = 320


@frozen
class TrainConfig(FitConfig):
    """
    How to train, beside what every such training has.

    Attributes:
        num_paths: paths of a block, from one up to this many.
        slips: how often a path slips.
    """

    num_paths: int = 4
    slips: float = 0.1


_DEFAULTS: Final = TrainConfig(steps=700, batch_size=24, learning_rate=4e-3, warmup_steps=50)


class _Plain:
    """The tokenizer as turnwise speaks to it: nothing is added around a text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer

    @property
    def eos_token_id(self) -> int | None:
        eos: int | None = self._tokenizer.eos_token_id
        return eos

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int32]]) -> str:
        return str(self._tokenizer.decode([int(token_id) for token_id in token_ids]))


def recipe(config: TrainConfig) -> Recipe:
    """Build tokenizer, model of about 400 thousand parameters, and batches; each tag is one token."""
    tags = [value for name, value in asdict(Tags()).items() if name != "separator"]
    demonstrated = (text for question, answer in _texts(config, 300) for text in (f"user\n{question}", answer))
    tokenizer = byte_level_tokenizer([*demonstrated, "assistant\n" * 100], _VOCAB_SIZE, tags=tags)
    model = tiny_qwen3(tokenizer, hidden_size=96, intermediate_size=256, num_layers=3, head_dim=32)
    return Recipe(tokenizer, model, batched(records(config, tokenizer), config.batch_size, collate))


def _texts(config: TrainConfig, num: int | None = None) -> Iterator[tuple[str, str]]:
    """Yield questions and tagged responses."""
    source = random.Random(config.seed)
    for problem in islice(problems("train", config.seed), num):
        num_paths = source.randint(1, config.num_paths)
        yield problem.question, demonstration(problem, source, num_paths=num_paths, slips=config.slips)


def records(config: TrainConfig, tokenizer: PreTrainedTokenizerFast) -> Iterator[Trajectory]:
    """Yield demonstrations as records."""
    plain = _Plain(tokenizer)
    for question, response in _texts(config):
        messages = [{"role": "user", "content": question}]
        prompt = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        yield trajectory_of(plain.encode(prompt), response, plain, end=[tokenizer.eos_token_id])


def collate(batch: Sequence[Trajectory]) -> Batch:
    """
    Pad records on the right.

    Returns:
        Ids (B, T), positions (B, T) and an additive mask (B, 1, T, T) by name, and targets (B, T) with what is not an
        action ignored. A path's first token is forced, so every action is predicted from the token before it.
    """
    length = max(map(len, batch))
    ids, positions = (
        torch.zeros(len(batch), length, dtype=torch.long),
        torch.zeros(len(batch), length, dtype=torch.long),
    )
    targets = torch.full((len(batch), length), IGNORED)
    visible = torch.eye(length, dtype=torch.bool).repeat(len(batch), 1, 1)
    for row, record in enumerate(batch):
        size = len(record)
        ids[row, :size] = torch.from_numpy(record.input_ids.astype(np.int64))
        positions[row, :size] = torch.from_numpy(record.position_ids.astype(np.int64))
        visible[row, :size, :size] = torch.from_numpy(
            visible_keys(record.block_start, record.path_start, np.arange(size))
        )
        actions = torch.from_numpy(record.response_mask.astype(bool))
        start = record.num_prompt_tokens
        targets[row, start:size] = torch.where(actions, ids[row, start:size], IGNORED)
    mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)
    return {"input_ids": ids, "position_ids": positions, "attention_mask": mask[:, None]}, targets


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; None takes the arguments of the process."""
    prog = "python -m turnwise_parallel_thinking.demo.train"
    train_command(prog, "Train the demo model from scratch on CPU.", _DEFAULTS, recipe, arguments)


if __name__ == "__main__":
    main()
