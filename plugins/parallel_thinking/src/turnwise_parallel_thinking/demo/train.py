"""
Trains the demo model from scratch on a CPU. It took 26 minutes on two cores that did much else at the time.

Demonstrations are tagged texts. `demonstrations.trajectory_of` makes records of them, and the model is trained under
their layout: the positions and the visibility that it is sampled with.
"""

# ruff: noqa: T201, TID253 - a command; no hook imports it

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
import torch
from attrs import asdict, frozen
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from turnwise import Trajectory
from turnwise.layout import visible_keys
from turnwise_parallel_thinking.config import Tags
from turnwise_parallel_thinking.demo.sums import demonstration, problems
from turnwise_parallel_thinking.demonstrations import trajectory_of

CONTEXT_LENGTH: Final = 2048
CHAT_TEMPLATE: Final = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_IGNORED: Final = -100
_VOCAB_SIZE: Final = 320


@frozen
class TrainConfig:
    """
    How to train.

    Attributes:
        steps: optimizer steps.
        batch_size: demonstrations a step.
        learning_rate: the highest one, reached after the warm-up.
        warmup_steps: steps over which it rises.
        num_paths: paths of a block, from one up to this many.
        slips: how often a path slips.
        seed: of the weights and of the data.
    """

    steps: int = 700
    batch_size: int = 24
    learning_rate: float = 4e-3
    warmup_steps: int = 50
    num_paths: int = 4
    slips: float = 0.1
    seed: int = 0


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


def build_tokenizer(config: TrainConfig) -> PreTrainedTokenizerFast:
    """Learn merges from demonstrations: bytes, digits apart, and each tag one token that decoding keeps."""
    tags = [value for name, value in asdict(Tags()).items() if name != "separator"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE - len(tags),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in _SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [text for question, response in _texts(config, 300) for text in (f"user\n{question}", response)]
    tokenizer.train_from_iterator([*corpus, "assistant\n" * 100], trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return a randomly initialised Qwen3 of about 400 thousand parameters, in float32."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]  # transformers leaves it unannotated


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


def collate(batch: Sequence[Trajectory]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """
    Pad records on the right.

    Returns:
        ids (B, T), positions (B, T), an additive mask (B, 1, T, T), and targets (B, T) with what is not an action
        ignored. A path's first token is forced, so every action is predicted from the token before it.
    """
    length = max(map(len, batch))
    ids, positions = (
        torch.zeros(len(batch), length, dtype=torch.long),
        torch.zeros(len(batch), length, dtype=torch.long),
    )
    targets = torch.full((len(batch), length), _IGNORED)
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
        targets[row, start:size] = torch.where(actions, ids[row, start:size], _IGNORED)
    mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)
    return ids, positions, mask[:, None], targets


def train(config: TrainConfig, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Train a model in place and print its progress."""
    stream = records(config, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate_scale(config, step))
    started = time.perf_counter()
    model.train()
    for step in range(1, config.steps + 1):
        ids, positions, mask, targets = collate(list(islice(stream, config.batch_size)))
        logits = model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=_IGNORED)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == config.steps:
            elapsed_s = time.perf_counter() - started
            print(f"step {step:5d}/{config.steps}  loss {loss.item():.4f}  {elapsed_s:6.1f} s", flush=True)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the model's folder: weights, configs, tokenizer and chat template."""
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    names = json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")
    # safetensors makes a file that its owner alone can read; an installed package is read by everybody.
    (folder / "model.safetensors").chmod(0o644)


def _learning_rate_scale(config: TrainConfig, step: int) -> float:
    """Warm-up, then half a cosine down to zero."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m turnwise_parallel_thinking.demo.train", description="Train the demo model from scratch on CPU."
    )
    defaults = TrainConfig()
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=defaults.steps, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="seed of weights and data (default: 0)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    options = parser.parse_args(arguments)
    config = TrainConfig(steps=options.steps, seed=options.seed)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
    torch.set_num_threads(options.threads)
    torch.manual_seed(config.seed)
    tokenizer = build_tokenizer(config)
    model = build_model(tokenizer)
    print(f"training {model.num_parameters():,} parameters for {config.steps} steps", flush=True)
    train(config, model, tokenizer)
    save(model, tokenizer, options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
