"""
Trains the tiny model from scratch, on one CPU thread, in a few minutes.

First from demonstrations without slips, from which it learns to read a question and to copy numbers, then with slips,
from which it learns how often to be wrong.

    python -m turnwise_torl_python.demo.train --out model
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

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from turnwise_torl_python.demo.encoding import CONTEXT_LENGTH, build_tokenizer, encode, prompt_text
from turnwise_torl_python.demo.problems import generate_problems
from turnwise_torl_python.demo.solver import CLEAN, SHIPPED_SLIPS, NoisySolver

_VOCAB_SIZE: Final = 448
_IGNORED: Final = -100
_WARMUP_STEPS: Final = 100


@frozen
class TrainConfig:
    """
    How to train.

    Attributes:
        steps: optimizer steps of both phases together.
        clean_share: part of the steps whose demonstrations hold no slips.
        batch_size: demonstrations a step.
        learning_rate: the highest learning rate, reached after the warm-up.
        seed: of the weights and of the data.
    """

    steps: int = 1200
    clean_share: float = 0.6
    batch_size: int = 32
    learning_rate: float = 3e-3
    seed: int = 0


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return a randomly initialised Qwen3 of about 650 thousand parameters, in float32."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]  # transformers leaves it unannotated


def demonstrations(config: TrainConfig, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield an endless stream of encoded demonstrations, first without slips and then with."""
    source = random.Random(config.seed)
    clean, noisy = NoisySolver(CLEAN, source), NoisySolver(SHIPPED_SLIPS, source)
    num_clean = round(config.steps * config.clean_share) * config.batch_size
    for index, problem in enumerate(generate_problems("train", config.seed)):
        solver = clean if index < num_clean else noisy
        yield encode(tokenizer, problem, solver.solve(problem))


def train(config: TrainConfig, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Train a model in place and print its progress."""
    stream = demonstrations(config, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate_scale(config, step))
    started = time.perf_counter()
    model.train()
    for step in range(1, config.steps + 1):
        loss = _loss(model, *_collate(list(islice(stream, config.batch_size))))
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
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]  # likewise
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The class by the name that transformers 4 knows too.
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _collate(batch: Sequence[tuple[list[int], list[bool]]]) -> tuple[Tensor, Tensor]:
    """Pad on the right: ids [batch, length], and the same with every token that is not learned ignored."""
    length = max(len(ids) for ids, _ in batch)
    inputs = torch.zeros(len(batch), length, dtype=torch.long)
    targets = torch.full((len(batch), length), _IGNORED)
    for row, (ids, mask) in enumerate(batch):
        inputs[row, : len(ids)] = torch.tensor(ids)
        targets[row, : len(ids)] = torch.where(torch.tensor(mask), inputs[row, : len(ids)], _IGNORED)
    return inputs, targets


def _loss(model: Qwen3ForCausalLM, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the tokens that the model writes."""
    logits = model(input_ids=inputs, use_cache=False).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=_IGNORED)


def _learning_rate_scale(config: TrainConfig, step: int) -> float:
    """Warm-up, then half a cosine down to zero."""
    if step < _WARMUP_STEPS:
        return (step + 1) / _WARMUP_STEPS
    progress = (step - _WARMUP_STEPS) / max(1, config.steps - _WARMUP_STEPS)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _corpus(config: TrainConfig) -> Iterator[str]:
    """Questions and demonstrations to learn the merges from."""
    yield "system\nuser\nassistant\n" * 50
    solver = NoisySolver(SHIPPED_SLIPS, random.Random(config.seed))
    for problem in islice(generate_problems("train", config.seed), 500):
        yield prompt_text(problem)
        for turn in solver.solve(problem):
            yield f"{turn.text}\n{turn.output}\n```\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; None takes the arguments of the process."""
    defaults = TrainConfig()
    parser = argparse.ArgumentParser(
        prog="python -m turnwise_torl_python.demo.train",
        description="Train the tiny model that writes programs, from scratch on CPU.",
        epilog="example: python -m turnwise_torl_python.demo.train --out model --steps 200",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=defaults.steps, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="seed of weights and data (default: 0)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    options = parser.parse_args(arguments)
    config = TrainConfig(steps=options.steps, seed=options.seed)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # likewise
    torch.set_num_threads(options.threads)
    torch.manual_seed(config.seed)
    tokenizer = build_tokenizer(_corpus(config), _VOCAB_SIZE)
    model = build_model(tokenizer)
    print(f"training {model.num_parameters():,} parameters for {config.steps} steps", flush=True)
    train(config, model, tokenizer)
    save(model, tokenizer, options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
