"""Prints the episodes of a run, or one of them with the origin of its tokens."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from turnwise.config.file import load_config
from turnwise.console import Console
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.protocols.command import OK
from turnwise.record.result import EpisodeResult
from turnwise.terminal import one_line
from turnwise.types import TokenArray
from turnwise_chat_templates import load_chat
from turnwise_commands.display import Decode, picture_line, report_view, results_table, trajectory_view
from turnwise_result_files import find_rows, read_results
from turnwise_result_files.resumption import CONFIG_FILE


def print_episodes(arguments: argparse.Namespace) -> int:
    """Print the table of a run, or one episode, and return the exit code."""
    path: Path = arguments.dir
    if not path.exists():
        raise ConfigError(f"{path}: does not exist; name the folder of a rollout, as given to --out")
    file = find_rows(path, "trajectories") if path.is_dir() else path
    # The file holds episodes as they finished; people count them as they were asked for.
    results = sorted(read_results(file), key=lambda r: (r.task.sample_index, r.task.uid, r.rollout_n))
    console = Console(no_color=arguments.no_color or None, soft_wrap=arguments.index is not None)
    if arguments.index is None:
        console.print(results_table(results))
    else:
        _print_one(console, results, arguments.index, decoder(file.parent))
    return OK


def _print_one(console: Console, results: Sequence[EpisodeResult], index: int, decode: Decode) -> None:
    if not 0 <= index < len(results):
        raise ConfigError(f"there is no episode {index}: the run has {len(results)}, counted from 0")
    result = results[index]
    console.print(results_table([result]))
    for trajectory in result.trajectories:
        view = trajectory_view(trajectory, decode, color=not console.no_color and console.is_terminal)
        # Columns of paths are wrapped to the width there is; without it their ends would be cut off.
        console.print(view, soft_wrap=not trajectory.has_blocks)
        for place in trajectory.pictures:
            console.print(picture_line(place))
    for report in result.reports:
        console.print(report_view(report))
    if result.limit is not None:
        console.print(Text(f"ended: {one_line(str(result.limit))}"))
    fault = result.fault
    if fault is not None:
        console.print(f"{result.status}: {fault.owner}: {fault.kind}: {fault.message}")


def decoder(folder: Path) -> Decode:
    """Return the decoder of the run's tokenizer, or one that prints bare ids when the tokenizer cannot be loaded."""
    try:
        model = load_config(folder / CONFIG_FILE).model_spec()
        if model.path is not None:
            return load_chat(model).tokenizer.decode
    except TurnwiseError:
        pass
    return _ids_as_text


def _ids_as_text(token_ids: TokenArray) -> str:
    return " ".join(map(str, token_ids.tolist()))
