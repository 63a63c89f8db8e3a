"""The command that trains a model and writes its folder."""

# ruff: noqa: T201 - a command

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from attrs import evolve
from transformers.utils.logging import disable_progress_bar

from turnwise_tiny_models.fitting import FitConfig, Recipe, fit
from turnwise_tiny_models.model import save

Config = TypeVar("Config", bound=FitConfig)


def train_command(
    prog: str,
    description: str,
    defaults: Config,
    recipe_of: Callable[[Config], Recipe],
    arguments: Sequence[str] | None = None,
) -> None:
    """
    Run the command line.

    Args:
        prog: how it is called.
        description: what it trains.
        defaults: how it trains unless told otherwise.
        recipe_of: builds what is trained; torch is seeded before.
        arguments: of the command line; None takes those of the process.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=f"examples:\n  {prog} --out model\n  {prog} --out quick --steps 200 --seed 1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=_count, default=defaults.steps, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="seed of weights and data (default: 0)")
    parser.add_argument("--threads", type=_count, default=1, help="CPU threads (default: %(default)s)")
    options = parser.parse_args(arguments)
    config = evolve(defaults, steps=options.steps, seed=options.seed)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
    torch.set_num_threads(options.threads)
    torch.manual_seed(config.seed)
    recipe = recipe_of(config)
    print(f"training {recipe.model.num_parameters():,} parameters for {config.steps} steps", flush=True)
    fit(recipe, config)
    save(recipe.model, recipe.tokenizer, options.out)
    print(f"wrote {options.out}")


def _count(text: str) -> int:
    """Return a whole number above zero; argparse turns the error into a line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number above zero, got {number}")
    return number
