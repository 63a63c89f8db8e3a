"""
Trains the demo model from scratch on CPU, in about a quarter of an hour on two idle cores.

Two phases: first demonstrations without slips, from which the model learns to read an expression and to copy numbers,
then demonstrations with slips, from which it learns how often to be wrong. The learning rate falls to zero within the
second phase, so the probabilities it ends with are close to the slip rates.
"""

# ruff: noqa: T201, TID253 - a command; no hook imports it

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

from turnwise_calculator_demo.demonstrations import CLEAN, NoisySolver, SlipRates
from turnwise_calculator_demo.encoding import EpisodeEncoder
from turnwise_calculator_demo.episodes import TOOL_NAME
from turnwise_calculator_demo.tasks import Problem, generate_problems
from turnwise_calculator_demo.tokenizer import CONTEXT_LENGTH, build_tokenizer

SHIPPED_SLIPS: Final = SlipRates(digit=0.08, order=0.12, early=0.3, rushed=0.04)
"""The rates of the shipped model: a solver that is right on about 48 % of the tasks."""

_STEP_WEIGHTS: Final = {1: 10, 2: 45, 3: 45}
"""Long problems are the harder ones to read, so they are shown more often than they are asked."""

_VOCAB_SIZE: Final = 384
_IGNORED: Final = -100
_EXAMPLES: Final = """
examples:
  python -m turnwise_calculator_demo.train --out model
  python -m turnwise_calculator_demo.train --out quick --steps 200 --seed 1
"""


@frozen
class TrainConfig:
    """
    How to train.

    Attributes:
        steps: optimizer steps of both phases together.
        clean_share: part of the steps whose demonstrations hold no slips.
        batch_size: demonstrations a step.
        learning_rate: the highest learning rate, reached after the warm-up.
        warmup_steps: steps over which the learning rate rises.
        without_tools: part of the demonstrations whose prompt does not list the calculator.
        seed: of the weights and of the data.
        slips: what the second phase imitates.
    """

    steps: int = 1500
    clean_share: float = 0.6
    batch_size: int = 32
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    without_tools: float = 0.1
    seed: int = 0
    slips: SlipRates = SHIPPED_SLIPS


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """
    A randomly initialised Qwen3 of about 640 thousand parameters, in float32.

    Args:
        tokenizer: The tokenizer whose vocabulary it reads and writes.
    """
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


def demonstrations(config: TrainConfig, encoder: EpisodeEncoder) -> Iterator[tuple[list[int], list[bool]]]:
    """
    An endless stream of encoded demonstrations for each phase in turn.

    Args:
        config: How to train.
        encoder: The tokenizer's encoder.

    Yields:
        Token ids and, of the same length, whether the assistant wrote the token.
    """
    source = random.Random(config.seed)
    clean, noisy = NoisySolver(CLEAN, source), NoisySolver(config.slips, source)
    num_clean = round(config.steps * config.clean_share) * config.batch_size
    for index, problem in enumerate(generate_problems("train", config.seed, _STEP_WEIGHTS)):
        with_tools = source.random() >= config.without_tools
        yield _encode(problem, clean if index < num_clean else noisy, encoder, with_tools=with_tools)


def train(config: TrainConfig, model: Qwen3ForCausalLM, encoder: EpisodeEncoder) -> None:
    """
    Trains a model in place and prints its progress.

    Args:
        config: How to train.
        model: The model.
        encoder: The encoder of its tokenizer.
    """
    stream = demonstrations(config, encoder)
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
    """
    Writes the model's folder: weights, configs, tokenizer and chat template.

    Args:
        model: The trained model.
        tokenizer: Its tokenizer.
        folder: Created where it does not exist.
    """
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
    _name_public_class(folder / "tokenizer_config.json")
    # safetensors makes a file that its owner alone can read; an installed package is read by everybody.
    (folder / "model.safetensors").chmod(0o644)


def _name_public_class(path: Path) -> None:
    """Write the tokenizer's class by the name that transformers 4 knows too."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _encode(
    problem: Problem, solver: NoisySolver, encoder: EpisodeEncoder, *, with_tools: bool
) -> tuple[list[int], list[bool]]:
    """One demonstration as ids and as the mask of what the assistant wrote."""
    ids = encoder.prompt(problem.question, with_tools=with_tools)
    mask = [False] * len(ids)
    for turn in solver.solve(problem):
        action = encoder.action(turn.text)
        observation = [] if turn.response is None else encoder.observation(turn.response)
        ids += action + observation
        mask += [True] * len(action) + [False] * len(observation)
    return ids, mask


def _collate(batch: Sequence[tuple[list[int], list[bool]]]) -> tuple[Tensor, Tensor]:
    """
    Pads on the right: ids [batch, length], and the same with every token that is not learned ignored.

    Under the causal mask no real token sees the padding after it, so no attention mask is needed.
    """
    length = max(len(ids) for ids, _ in batch)
    inputs = torch.zeros(len(batch), length, dtype=torch.long)
    targets = torch.full((len(batch), length), _IGNORED)
    for row, (ids, mask) in enumerate(batch):
        inputs[row, : len(ids)] = torch.tensor(ids)
        targets[row, : len(ids)] = torch.where(torch.tensor(mask), inputs[row, : len(ids)], _IGNORED)
    return inputs, targets


def _loss(model: Qwen3ForCausalLM, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the assistant's tokens."""
    logits = model(input_ids=inputs, use_cache=False).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=_IGNORED)


def _learning_rate_scale(config: TrainConfig, step: int) -> float:
    """Warm-up, then half a cosine down to zero."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _corpus(config: TrainConfig) -> Iterator[str]:
    """Questions and demonstrations to learn the merges from."""
    yield f"Tools: {TOOL_NAME}(expression)"
    yield "system\nuser\nassistant\n" * 100
    solver = NoisySolver(config.slips, random.Random(config.seed))
    for problem in islice(generate_problems("train", config.seed), 500):
        yield problem.question
        for turn in solver.solve(problem):
            yield f"assistant\n{turn.text}"
            yield f"user\n{turn.response}"


def _parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m turnwise_calculator_demo.train",
        description="Train the calculator demo model from scratch on CPU.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = TrainConfig()
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=defaults.steps, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="seed of weights and data (default: 0)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """
    Runs the command line.

    Args:
        arguments: The arguments; None takes those of the process.
    """
    options = _parser().parse_args(arguments)
    config = TrainConfig(steps=options.steps, seed=options.seed)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(options.threads)
    torch.manual_seed(config.seed)
    tokenizer = build_tokenizer(_corpus(config), _VOCAB_SIZE)
    model = build_model(tokenizer)
    print(f"training {model.num_parameters():,} parameters for {config.steps} steps", flush=True)
    train(config, model, EpisodeEncoder(tokenizer))
    save(model, tokenizer, options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
