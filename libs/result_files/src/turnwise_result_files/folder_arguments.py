"""Command-line options of commands that run a config in a folder: where results go, and what happens to older ones."""

from __future__ import annotations

import argparse
from pathlib import Path

from turnwise.errors import ConfigError
from turnwise_result_files.resumption import config_of
from turnwise_result_files.run_folder import Existing


def add_folder_arguments(
    parser: argparse.ArgumentParser,
    *,
    example: str = "rollout.n=4",
    resumes: str = "continue the run in DIR",
    has_retries: bool = True,
) -> None:
    """
    Add a config with overrides, and the options `--out`, `--resume`, `--retry-failed` and `--overwrite`.

    Args:
        parser: of the command.
        example: of an override.
        resumes: help of `--resume`.
        has_retries: add `--retry-failed`.
    """
    parser.add_argument("config", nargs="?", help="YAML or TOML file")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help=f"set a value, such as {example}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results; created when missing")
    parser.add_argument("--resume", type=Path, metavar="DIR", help=resumes)
    if has_retries:
        parser.add_argument("--retry-failed", action="store_true", help="with --resume: run such episodes again")
    parser.add_argument("--overwrite", action="store_true", help="replace the results that DIR holds")


def config_path(arguments: argparse.Namespace, *, needs_out: bool) -> str:
    """
    Return the config to read: the given one, or the config of the run to resume.

    Raises:
        ConfigError: options exclude each other, `--out` is missing and needed, or the folder to resume holds no run.
    """
    if arguments.resume is not None:
        if arguments.config is not None or arguments.out is not None or arguments.overwrite:
            raise ConfigError("--resume DIR uses the config of that run: give no config, no --out and no --overwrite")
        return str(config_of(arguments.resume))
    if getattr(arguments, "retry_failed", False):
        raise ConfigError("--retry-failed needs --resume DIR")
    if arguments.config is None or (needs_out and arguments.out is None):
        raise ConfigError(f"give a config{' and --out DIR' if needs_out else ''}, or --resume DIR")
    if arguments.overwrite and arguments.out is None:
        raise ConfigError("--overwrite needs --out DIR")
    return str(arguments.config)


def existing_results(arguments: argparse.Namespace) -> Existing:
    """Return how the options treat results that the folder holds."""
    if arguments.resume is not None:
        return "retry_failed" if arguments.retry_failed else "resume"
    return "overwrite" if arguments.overwrite else "refuse"
