"""
Trains the demo model from scratch on a CPU, in under half an hour on two cores.

Demonstrations are tagged texts. `demonstrations.build_trajectory` makes records of them, and the model is trained under
their layout, which has the positions and the visibility of sampling.
"""

# ruff: noqa: TID253 - a command; no hook imports it

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

import numpy as np
import torch
from attrs import asdict, frozen
from transformers import PreTrainedTokenizerFast

from turnwise import Trajectory
from turnwise.layout import visible_keys
from turnwise_parallel_thinking.config import Tags
from turnwise_parallel_thinking.demo.sums import generate_problems, write_demonstration
from turnwise_parallel_thinking.demonstrations import build_trajectory
from turnwise_tiny_models import (
    IGNORE_INDEX,
    Batch,
    FitConfig,
    Training,
    batched,
    byte_level_tokenizer,
    tiny_qwen3,
    train_command,
)

_VOCAB_SIZE: Final = 320


@frozen
class TrainConfig(FitConfig):
    """
    Options of the training.

    Attributes:
        num_paths: most paths of a block; their number is drawn from 1 up to this.
        slips: probability that a path slips.
    """

    num_paths: int = 4
    slips: float = 0.1


_DEFAULTS: Final = TrainConfig(steps=700, batch_size=24, learning_rate=4e-3, warmup_steps=50)


class _PlainTokenizer:
    """A tokenizer of transformers as turnwise's `Tokenizer`, which adds no special tokens."""

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


def build_training(config: TrainConfig) -> Training:
    """Build tokenizer, model of about 400 thousand parameters, and batches; each tag is one token."""
    tokenizer = train_tokenizer(_generate_texts(config, 300))
    model = tiny_qwen3(tokenizer, hidden_size=96, intermediate_size=256, num_layers=3, head_dim=32)
    records = generate_records(_generate_texts(config), tokenizer)
    return Training(tokenizer, model, batched(records, config.batch_size, collate))


def train_tokenizer(texts: Iterable[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """Return a tokenizer for pairs of a question and a tagged response; each tag is one token."""
    tags = [value for name, value in asdict(Tags()).items() if name != "separator"]
    demonstrated = (text for question, answer in texts for text in (f"user\n{question}", answer))
    return byte_level_tokenizer([*demonstrated, "assistant\n" * 100], _VOCAB_SIZE, tags=tags)


def _generate_texts(config: TrainConfig, num: int | None = None) -> Iterator[tuple[str, str]]:
    """Yield pairs of a question and a tagged response."""
    source = random.Random(config.seed)
    for problem in islice(generate_problems("train", config.seed), num):
        num_paths = source.randint(1, config.num_paths)
        yield problem.question, write_demonstration(problem, source, num_paths=num_paths, slips=config.slips)


def generate_records(texts: Iterable[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> Iterator[Trajectory]:
    """Yield demonstrations, which are pairs of a question and a tagged response, as records."""
    plain = _PlainTokenizer(tokenizer)
    for question, response in texts:
        messages = [{"role": "user", "content": question}]
        prompt = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        yield build_trajectory(plain.encode(prompt), response, plain, end=[tokenizer.eos_token_id])


def collate(batch: Sequence[Trajectory]) -> Batch:
    """
    Pad records on the right.

    Returns:
        Ids (B, T), positions (B, T) and an additive mask (B, 1, T, T) by name, and targets (B, T) that ignore all
        tokens but actions. A path's first token is forced, so every action is predicted from the previous column.
    """
    length = max(map(len, batch))
    ids, positions = (
        torch.zeros(len(batch), length, dtype=torch.long),
        torch.zeros(len(batch), length, dtype=torch.long),
    )
    targets = torch.full((len(batch), length), IGNORE_INDEX)
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
        targets[row, start:size] = torch.where(actions, ids[row, start:size], IGNORE_INDEX)
    mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)
    return {"input_ids": ids, "position_ids": positions, "attention_mask": mask[:, None]}, targets


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; None uses the arguments of the process."""
    prog = "python -m turnwise_parallel_thinking.demo.train"
    train_command(prog, "Train the demo model from scratch on CPU.", _DEFAULTS, build_training, arguments)


if __name__ == "__main__":
    main()
