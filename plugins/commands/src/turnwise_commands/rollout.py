"""Runs the tasks of a config in a folder, and prints what came out."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Final

from turnwise.config.parts import Choice
from turnwise.config.resolve import load_resolved
from turnwise.console import Console
from turnwise.errors import ConfigError, PluginError, TurnwiseError
from turnwise.events.logging import configure_logging
from turnwise.plugin.host import Host
from turnwise.protocols.command import INTERRUPTED, OK
from turnwise.terminal import write_error
from turnwise.types import Status
from turnwise_commands.display import results_table, summary_table
from turnwise_result_files.folder_arguments import (
    check_same_config,
    config_path,
    existing_results,
)
from turnwise_result_files.resumption import (
    refuse_failures,
)
from turnwise_result_files.run_folder import FolderRun, run_in_folder
from turnwise_result_files.summary import note_truncations
from turnwise_task_files import load_tasks

_TRACE_OBSERVER: Final = "trace_file"
_SHOWN_EPISODES: Final = 20


def run_rollout(arguments: argparse.Namespace) -> int:
    """Run the tasks, or the rest of them, and return the exit code."""
    config, host = load_resolved(config_path(arguments, needs_out=True), arguments.overrides)
    config = check_same_config(arguments, config)
    configure_logging(config.telemetry.log_level, config.telemetry.log_format, whole_stream=True)
    run = run_in_folder(
        arguments.resume or arguments.out,
        config,
        host,
        load_tasks(config),
        existing_results(arguments),
        () if arguments.trace is None else (_trace_to(arguments.trace, host),),
    )
    if not run.was_complete:
        return _finish(run)
    failed = sum(result.status is Status.FAILED for result in run.results)
    text = f", and {failed} of them failed" if failed else ""
    write_error(f"turnwise: {run.out}: all {len(run.results)} episodes have finished{text}\n")
    refuse_failures(run.results, _retry(run))
    return OK


def _trace_to(file: Path, host: Host) -> Choice:
    """Return the observer that writes a trace file; `ConfigError` if no plugin registers it."""
    try:
        host.entry("observers", _TRACE_OBSERVER)
    except PluginError as error:
        raise ConfigError(f"--trace {file}: {error}") from error
    return Choice(_TRACE_OBSERVER, {"path": str(file)})


def _finish(run: FolderRun) -> int:
    """Print the tables and return the exit code."""
    console = Console()
    console.print(summary_table(run.summary))
    hint = f"; to look at one episode: turnwise show {run.out} 0" if run.results else ""
    console.print(f"wrote {run.out}{hint}", soft_wrap=True)
    if run.summary["dropped"] and not run.results:
        raise TurnwiseError(f"all {run.summary['dropped']} episodes were dropped: their prompts are too long")
    console.print(results_table(run.results, limit=_SHOWN_EPISODES))
    if note := note_truncations(run.results):
        console.print(note, soft_wrap=True)
    refuse_failures(run.results, _retry(run))
    if run.interrupted:
        with suppress(OSError):  # Ctrl-C ends the reader of a pipe too
            write_error(f"turnwise: interrupted; to run the rest: turnwise rollout --resume {run.out}\n")
        return INTERRUPTED
    return OK


def _retry(run: FolderRun) -> str:
    return f"turnwise rollout --resume {run.out} --retry-failed"
