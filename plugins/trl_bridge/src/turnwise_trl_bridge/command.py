"""The command `turnwise trl CONFIG`: trains the model of a config with TRL."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from pathlib import Path
from typing import Any, Final

from turnwise import NoConfig, Resources
from turnwise.errors import ConfigError
from turnwise.terminal import write_output

_OK: Final = 0
_SEEDS: Final = 1 << 32
_NEEDED: Final = ("trl", "torch", "transformers", "datasets", "accelerate")


class TrlCommand:
    """Trains with TRL's GRPOTrainer or AsyncGRPOTrainer on the episodes of a config."""

    help = "train the model of a config with TRL on turnwise rollouts"

    def __init__(self, config: NoConfig, resources: Resources) -> None:
        """Ignore both: all options are on the command line."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = (
            "Examples:\n"
            "  turnwise trl examples/calculator.yaml --steps 20 --out runs/trl\n"
            "  turnwise trl examples/calculator.yaml rollout.n=8 --async --steps 20 --out runs/trl-async\n\n"
            "rollout.n is the group size. Writes the model, the tokenizer and log.json to DIR."
        )
        parser.add_argument("config", help="YAML or TOML file")
        parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="set a value, such as rollout.n=8")
        parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="output folder, empty or missing")
        parser.add_argument("--steps", type=positive_int, default=100, help="optimizer steps (default 100)")
        parser.add_argument("--prompts", type=positive_int, default=8, help="tasks per step (default 8)")
        parser.add_argument(
            "--learning-rate", type=learning_rate, default=1e-5, help="learning rate of AdamW (default 1e-5)"
        )
        parser.add_argument(
            "--async",
            dest="overlap",
            action="store_true",
            help="use AsyncGRPOTrainer",
        )
        parser.add_argument("--seed", type=seed, default=0, help="seed of the trainer (default 0)")

    def run(self, arguments: argparse.Namespace) -> int:
        check_installed("trl")
        from turnwise import load_resolved
        from turnwise.config.models import pin_models
        from turnwise_task_files import load_tasks

        config, host = load_resolved(arguments.config, arguments.overrides)
        if config.rollout.n < 2:
            raise ConfigError(f"rollout.n is the group size and must be at least 2, got {config.rollout.n}")
        if config.model.path is None:
            raise ConfigError("model.path is not set: set it to the model to train")
        tasks = load_tasks(config)
        check_out(arguments.out)
        config = pin_models(config, host, weights=True)
        from turnwise_trl_bridge.training import train_async, train_sync

        log = (train_async if arguments.overlap else train_sync)(config, tasks, arguments)
        (arguments.out / "log.json").write_text(json.dumps(log, indent=2) + "\n", encoding="utf-8")
        write_output(_format_rewards(log))
        return _OK


def check_installed(command: str) -> None:
    """Raise `ConfigError` with the hint if a package of the extra `trl` is missing."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"turnwise {command} needs {', '.join(missing)}: pip install 'turnwise-trl-bridge[trl]'")


def check_out(folder: Path) -> None:
    """Make the folder before a training, which writes it at its end; `ConfigError` unless it is empty or missing."""
    from turnwise.files import check_writable

    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"--out {folder} is not an empty folder: choose another or empty it")
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder)
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}") from error


def positive_int(text: str) -> int:
    """Parse an argument that is at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def learning_rate(text: str) -> float:
    """Parse an argument that is a finite number above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return number


def seed(text: str) -> int:
    """Parse an argument that transformers takes as a seed."""
    number = int(text)
    if not 0 <= number < _SEEDS:
        raise argparse.ArgumentTypeError(f"expected 0 to 2**32 - 1, got {number}")
    return number


def _format_rewards(log: list[dict[str, Any]]) -> str:
    rewards = [entry["reward"] for entry in log if "reward" in entry]
    if not rewards:
        return "no step was logged\n"
    window = max(1, min(5, len(rewards) // 2))
    first, last = sum(rewards[:window]) / window, sum(rewards[-window:]) / window
    return f"{len(rewards)} steps; mean reward {first:.3f} in the first {window}, {last:.3f} in the last {window}\n"
