"""Command-line options of commands that run a config in a folder: where results go, and what happens to older ones."""

from __future__ import annotations

import argparse
from itertools import zip_longest
from pathlib import Path

from turnwise import RunConfig
from turnwise.config.file import dump_yaml, with_absolute_paths
from turnwise.config.models import keep_commits
from turnwise.config.resolve import load_resolved
from turnwise.errors import ConfigError
from turnwise_result_files.resumption import CONFIG_FILE, config_of
from turnwise_result_files.run_folder import Existing


def add_folder_arguments(
    parser: argparse.ArgumentParser,
    *,
    example: str = "rollout.n=4",
    resumes: str = "continue the run in DIR, or start CONFIG there",
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

    A job may always give its config and `--resume DIR`: it starts the run if the folder holds none.

    Raises:
        ConfigError: options exclude each other, `--out` is missing and needed, or the folder to resume holds no run and
            there is no config to start with.
    """
    if arguments.resume is not None:
        if arguments.out is not None or arguments.overwrite:
            raise ConfigError("--resume DIR continues the run in DIR: give no --out and no --overwrite")
        return str(config_of(arguments.resume) if arguments.config is None else arguments.config)
    if getattr(arguments, "retry_failed", False):
        raise ConfigError("--retry-failed needs --resume DIR")
    if arguments.config is None or (needs_out and arguments.out is None):
        raise ConfigError(f"give a config{' and --out DIR' if needs_out else ''}, or --resume DIR")
    if arguments.overwrite and arguments.out is None:
        raise ConfigError("--overwrite needs --out DIR")
    return str(arguments.config)


def check_same_config(arguments: argparse.Namespace, config: RunConfig) -> RunConfig:
    """
    Refuse to resume a run with another config; `ConfigError` names the first line that differs.

    Returns:
        The config, with the commits of the run to resume for its models on the hub.
    """
    if arguments.resume is None or arguments.config is None or _is_start(arguments):
        return config
    recorded, _host = load_resolved(str(config_of(arguments.resume)), [])
    config = keep_commits(config, recorded)
    for given, before in zip_longest(
        *(dump_yaml(with_absolute_paths(each)).splitlines() for each in (config, recorded))
    ):
        if given != before:
            differs = f"{(before or 'nothing').strip()!r} there, {(given or 'nothing').strip()!r} given"
            raise ConfigError(f"--resume {arguments.resume}: holds the run of another config: {differs}")
    return config


def _is_start(arguments: argparse.Namespace) -> bool:
    return arguments.config is not None and not (arguments.resume / CONFIG_FILE).exists()


def existing_results(arguments: argparse.Namespace) -> Existing:
    """Return how the options treat results that the folder holds."""
    if arguments.resume is not None and not _is_start(arguments):
        return "retry_failed" if getattr(arguments, "retry_failed", False) else "resume"
    return "overwrite" if arguments.overwrite else "refuse"
