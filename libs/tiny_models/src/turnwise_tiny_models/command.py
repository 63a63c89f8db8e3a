"""The command line that trains a model and writes its folder."""

# ruff: noqa: T201 - a command

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from attrs import evolve
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from turnwise_tiny_models.fitting import FitConfig, Training, fit
from turnwise_tiny_models.model import save

Config = TypeVar("Config", bound=FitConfig)


def train_command(
    prog: str,
    description: str,
    defaults: Config,
    build_training: Callable[[Config], Training],
    arguments: Sequence[str] | None = None,
    save: Callable[[PreTrainedModel, PreTrainedTokenizerFast, Path], None] = save,
) -> None:
    """
    Run the training command.

    Args:
        prog: program name for the help text.
        description: one line for the help text.
        defaults: config whose steps and seed the options replace.
        build_training: builds tokenizer, model and batches; torch is seeded before the call.
        arguments: command-line arguments; None uses `sys.argv`.
        save: writes the folder of the trained model.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=f"examples:\n  {prog} --out model\n  {prog} --out quick --steps 200 --seed 1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument(
        "--steps", type=_positive_int, default=defaults.steps, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=defaults.seed, help="seed of weights and data (default: 0)")
    parser.add_argument("--threads", type=_positive_int, default=1, help="CPU threads (default: %(default)s)")
    options = parser.parse_args(arguments)
    config = evolve(defaults, steps=options.steps, seed=options.seed)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
    torch.set_num_threads(options.threads)
    torch.manual_seed(config.seed)
    training = build_training(config)
    print(f"training {training.model.num_parameters():,} parameters for {config.steps} steps", flush=True)
    fit(training, config)
    save(training.model, training.tokenizer, options.out)
    print(f"wrote {options.out}")


def _positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number
