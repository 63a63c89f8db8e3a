"""Options of `turnwise view` that choose the episodes of an exported page."""

from __future__ import annotations

import argparse
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from turnwise.errors import ConfigError
from turnwise.terminal import write_error, write_output
from turnwise.types import Status
from turnwise_viewer.episode_index import Filter
from turnwise_viewer.html_export import Choice, export
from turnwise_viewer.run_folder import RunFolder
from turnwise_viewer.text_search import check_searchable
from turnwise_viewer.training_metrics import read_series

_DEFAULT_MB: Final = 50.0
"""A browser opens a page of this size in some seconds."""
_FILTERS: Final = ("status", "min_reward", "max_reward", "tools", "step", "validation", "uid", "search")


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--export`, and the options that choose its episodes, which are those of the list in the page."""
    group = parser.add_argument_group("a page in a file")
    group.add_argument("--export", type=Path, metavar="FILE.html", help="write the page to a file and end")
    group.add_argument("--episodes", nargs="+", metavar="KEY", help="export these episodes, such as task-0001/3")
    group.add_argument(
        "--status", action="append", choices=[str(each) for each in Status], help="of this status; may be repeated"
    )
    group.add_argument("--min-reward", type=float, metavar="X", help="with this reward or more")
    group.add_argument("--max-reward", type=float, metavar="X", help="with this reward or less")
    group.add_argument("--tools", choices=["used", "unused", "errors"], help="by their use of tools")
    group.add_argument("--step", type=int, metavar="N", help="of this step of a training")
    group.add_argument("--validation", choices=["true", "false"], help="held-out episodes only, or all others")
    group.add_argument("--uid", metavar="TEXT", help="of tasks whose uid starts with this")
    group.add_argument("--search", metavar="TEXT", help="with this text in messages or tokens")
    group.add_argument("--max-mb", type=_size, metavar="N", help=f"largest size of the file; default {_DEFAULT_MB:g}")


def _size(text: str) -> float:
    size = float(text)
    if not 0 < size < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return size


def check_export_arguments(arguments: argparse.Namespace) -> None:
    """Raise `ConfigError` if options exclude each other, or the file cannot be written."""
    filters = [name for name in _FILTERS if getattr(arguments, name) is not None]
    if arguments.export is None:
        chosen = [name for name in ("episodes", *filters, "max_mb") if getattr(arguments, name) is not None]
        if chosen:
            raise ConfigError(f"{_option(chosen[0])} needs --export FILE.html; the page has filters itself")
        return
    if arguments.episodes is not None and filters:
        raise ConfigError(f"--episodes names the episodes; leave out {_option(filters[0])}")
    if arguments.port or arguments.live:
        raise ConfigError(f"--export serves no page; leave out {'--port' if arguments.port else '--live'}")
    file: Path = arguments.export
    if file.suffix not in (".html", ".htm"):
        raise ConfigError(f"--export {file}: the name does not end in .html")
    if file.is_dir():
        raise ConfigError(f"--export {file}: is a folder")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def export_runs(runs: Sequence[RunFolder], arguments: argparse.Namespace) -> None:
    """Write the page, and print its path and its size."""
    file: Path = arguments.export
    max_bytes = int((arguments.max_mb or _DEFAULT_MB) * 1e6)
    try:
        total = export(runs, _choice(arguments), file, max_bytes)
    except OSError as error:
        raise ConfigError(f"--export {file}: cannot be written: {error.strerror}") from error
    for run in runs:
        for problem in filter(None, (run.problem, read_series(run.folder).problem)):
            write_error(f"turnwise: {run.folder}/{problem}\n")
    write_error(f"{total} episodes, {file.stat().st_size / 1e6:.1f} MB\n")
    write_output(f"{file}\n")
    if arguments.open:
        webbrowser.open(file.resolve().as_uri())


def _choice(arguments: argparse.Namespace) -> Choice:
    wanted = Filter(
        status=tuple(arguments.status or ()),
        min_reward=arguments.min_reward,
        max_reward=arguments.max_reward,
        tools=arguments.tools or "",
        step=arguments.step,
        validation=None if arguments.validation is None else arguments.validation == "true",
        uid=arguments.uid or "",
    )
    return Choice(tuple(arguments.episodes or ()), wanted, check_searchable(arguments.search or ""))
