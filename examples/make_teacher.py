"""
Makes a teacher for `examples/distill_calculator.yaml`: the model of turnwise-calculator-demo with more layers.

    python examples/make_teacher.py --out runs/teacher

The new layers begin as the identity, so the larger model begins as good as the smaller one. It is then trained on
demonstrations without slips, in a few minutes on two CPU cores.
"""

# ruff: noqa: TID253 - a program that trains, which no hook imports

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise_calculator_demo import model_dir
from turnwise_calculator_demo.demonstrations import CLEAN, NoisySolver
from turnwise_calculator_demo.encoding import EpisodeEncoder
from turnwise_calculator_demo.tasks import generate_problems
from turnwise_calculator_demo.train import encode_demonstration
from turnwise_tiny_models import Demonstration, FitConfig, Training, batched, fit, pad_demonstrations, tiny_qwen3
from turnwise_tiny_models.model import save


def grow(small: Any, tokenizer: Any, num_new: int) -> Any:
    """Return a model with the layers of a smaller one and further ones behind them, which add 0 at first."""
    layers = small.config.num_hidden_layers
    large = tiny_qwen3(tokenizer, num_layers=layers + num_new)
    large.load_state_dict(small.state_dict(), strict=False)
    with torch.no_grad():
        for layer in large.model.layers[layers:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return large


def demonstrations(encoder: EpisodeEncoder, seed: int) -> Iterator[Demonstration]:
    """Yield an endless stream of encoded demonstrations without slips, of tasks as hard as those of the training."""
    solver = NoisySolver(CLEAN, random.Random(seed))
    for problem in generate_problems("train", seed, {1: 5, 2: 50, 3: 45}):
        yield encode_demonstration(problem, solver, encoder)


def main() -> None:
    """Make the teacher, and write its folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--layers", type=int, default=2, help="further layers (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and data (default: %(default)s)")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    model = grow(AutoModelForCausalLM.from_pretrained(model_dir()), tokenizer, options.layers)
    config = FitConfig(steps=options.steps, batch_size=16, learning_rate=1e-3, warmup_steps=20)
    stream = batched(demonstrations(EpisodeEncoder(tokenizer), options.seed), config.batch_size, pad_demonstrations)
    fit(Training(tokenizer, model, stream), config)
    save(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
