"""`turnwise rollout`: run a config's tasks and write what came of them."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

from rich.console import Console

from turnwise.cli.exit_codes import INTERRUPTED, OK
from turnwise.cli.progress import Tally, progress_view
from turnwise.cli.resolved_config import load_resolved
from turnwise.cli.resumption import (
    CONFIG_FILE,
    METRICS_FILE,
    TRAJECTORIES_FILE,
    UNFINISHED_FILE,
    Earlier,
    config_of,
    earlier_run,
    keep_unfinished,
)
from turnwise.config_file import anchored, dump_yaml
from turnwise.display import results_table, summary_table
from turnwise.errors import ConfigError, EngineError
from turnwise.result import EpisodeResult
from turnwise.row_file import PARTIAL
from turnwise.runtime.assembly import manager_of, tasks_of
from turnwise.runtime.finished_episodes import FinishedEpisodes
from turnwise.runtime.manager import RolloutManager
from turnwise.storage import TrajectoryWriter
from turnwise.summary import summarize, write_metrics
from turnwise.telemetry import configure_logging
from turnwise.trace_file import TraceFile
from turnwise.types import Status

BATCH_FILE: Final = "batch.safetensors"
_SHOWN_EPISODES: Final = 20


class RolloutCommand:
    """Run tasks through agents and keep their trajectories."""

    help = "run the tasks of a config and write trajectories, a batch and metrics"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare `CONFIG [a.b=c ...] --out DIR [--overwrite] [--trace FILE]`."""
        parser.epilog = (
            "Examples:\n"
            "  turnwise rollout examples/calculator.yaml --out runs/first\n"
            "  turnwise rollout examples/calculator.yaml rollout.n=8 rollout.seed=1 --out runs/groups\n"
            "  turnwise rollout examples/calculator.yaml --out runs/traced --trace runs/traced/trace.json\n\n"
            f"Writes {TRAJECTORIES_FILE}, {BATCH_FILE}, {METRICS_FILE} and {CONFIG_FILE}. An interrupt (Ctrl-C) ends\n"
            f"the running episodes and writes all that there is, and to {UNFINISHED_FILE} what they can go on from;\n"
            "a second one ends at once. --resume DIR goes on with a run that was interrupted or killed: what had\n"
            "finished is kept, the rest is run to its end.\n"
            "Exit codes: 0; 2 for a bad config or bad input; 130 when it was interrupted; 1 when every episode failed."
        )
        parser.add_argument("config", nargs="?", help="YAML or TOML file")
        parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="set a value, such as rollout.n=4")
        parser.add_argument("--out", type=Path, metavar="DIR", help="where to write; made when missing")
        parser.add_argument("--resume", type=Path, metavar="DIR", help="go on with the run that DIR holds")
        parser.add_argument("--overwrite", action="store_true", help="replace the results that DIR holds")
        parser.add_argument("--trace", type=Path, metavar="FILE", help="draw the run for https://ui.perfetto.dev")

    def run(self, arguments: argparse.Namespace) -> int:
        """Run, write and print a summary."""
        resuming = _resuming(arguments)
        source = str(config_of(arguments.resume)) if resuming else arguments.config
        config, host = load_resolved(source, arguments.overrides)
        configure_logging(config.telemetry.log_level, config.telemetry.log_format)
        tally = Tally()
        traces = [] if arguments.trace is None else [TraceFile(arguments.trace)]
        manager = manager_of(config, host, observers=[tally, *traces])
        step, validation = config.rollout.global_step, config.rollout.validation
        # A bad row is refused before an engine starts.
        specs = manager.plan.specs(tasks_of(config), global_step=step, validation=validation)
        decode = manager.chat.tokenizer.decode if manager.chat else None
        if resuming:
            out, earlier = arguments.resume, earlier_run(arguments.resume, specs, decode)
            if not earlier.todo:
                sys.stderr.write(f"turnwise: {out}: all {len(specs)} episodes have finished\n")
                return OK
        else:
            out = _prepared(arguments.out, overwrite=arguments.overwrite)
            (out / CONFIG_FILE).write_text(dump_yaml(anchored(config)), encoding="utf-8")
            earlier = Earlier.of(specs)
        with manager:
            episodes = manager.numbered([], global_step=step, validation=validation, resume=earlier.todo)
            run = _Run(manager, tally, out, earlier)
            with _interrupts(run, episodes):
                run.collect(episodes)
        return _finish(run)


def _resuming(arguments: argparse.Namespace) -> bool:
    """Return whether to go on with an earlier run; `ConfigError` for options that do not go together."""
    if arguments.resume is None:
        if arguments.config is None or arguments.out is None:
            raise ConfigError("give a config and --out DIR, or --resume DIR")
        return False
    if arguments.config is not None or arguments.out is not None or arguments.overwrite:
        raise ConfigError(
            "--resume DIR goes on with the config of that run: give no config, no --out and no --overwrite"
        )
    return True


def _prepared(out: Path, *, overwrite: bool) -> Path:
    """Return the folder, made and free of results; `ConfigError` when it holds some that may not be replaced."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: not a folder")
    names = (TRAJECTORIES_FILE, f"{TRAJECTORIES_FILE}{PARTIAL}", BATCH_FILE, METRICS_FILE, UNFINISHED_FILE)
    old = [out / name for name in names if (out / name).exists()]
    if old and not overwrite:
        raise ConfigError(f"--out {out}: holds the results of another run; choose another folder or add --overwrite")
    out.mkdir(parents=True, exist_ok=True)
    for path in old:
        path.unlink()
    return out


class _Run:
    """A run under way: shows progress, writes what finishes, and survives an interrupt."""

    def __init__(self, manager: RolloutManager, tally: Tally, out: Path, earlier: Earlier) -> None:
        self.manager = manager
        self.tally = tally
        self.out = out
        self.earlier = earlier
        self.results: list[EpisodeResult] = []
        self.interrupted = False
        self.summary: dict[str, Any] = {}

    def collect(self, episodes: FinishedEpisodes) -> None:
        """Take every episode, write it, and then the batch and the metrics."""
        started = time.perf_counter()
        chat = self.manager.chat
        (self.out / METRICS_FILE).unlink(missing_ok=True)  # is there again when this part has not been killed
        results = list(self.earlier.finished)
        with (
            TrajectoryWriter(self.out / TRAJECTORIES_FILE, decode=chat.tokenizer.decode if chat else None) as writer,
            progress_view(self.tally, episodes.total, Console(stderr=True)) as view,
        ):
            for result in self.earlier.finished:
                writer.write(result)
            for _number, result in episodes:
                if result.status is not Status.ABORTED or result.trajectories:  # an episode that began
                    writer.write(result)
                    results.append(result)
                view.update()
        keep_unfinished(self.out, self.manager.unfinished)
        self.results = self.earlier.in_order(results)
        spent_s = self.earlier.wall_s
        wall_s = None if spent_s is None else spent_s + time.perf_counter() - started
        self.summary = summarize(self.results, wall_s=wall_s)
        self.summary["interrupted"] = self.interrupted
        self.summary["not_begun"] = sum(not each.began for each in self.manager.unfinished)
        write_metrics(self.out / METRICS_FILE, self.summary)
        if self.results:
            self.manager.collate(self.results).save(self.out / BATCH_FILE)


@contextmanager
def _interrupts(run: _Run, episodes: FinishedEpisodes) -> Iterator[None]:
    """
    Make Ctrl-C end the run in good order: once asks the episodes to stop, twice goes on without them.

    The handler raises nothing, so an interrupt can neither lose an episode nor break a file.
    """

    def handle(_signal: int, _frame: FrameType | None) -> None:
        if run.interrupted:
            episodes.close()
            return
        run.interrupted = True
        sys.stderr.write("\nturnwise: interrupted: keeping what there is; again to go on without the rest\n")
        run.manager.abort()

    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _finish(run: _Run) -> int:
    """Print the tables and return the exit code."""
    console = Console()
    console.print(summary_table(run.summary))
    console.print(f"wrote {run.out}; to look at one episode: turnwise show {run.out} 0", soft_wrap=True, markup=False)
    console.print(results_table(run.results, limit=_SHOWN_EPISODES))
    failed = [result for result in run.results if result.status is Status.FAILED]
    if run.results and len(failed) == len(run.results):
        fault = failed[0].fault
        reason = f"{fault.owner}: {fault.kind}: {fault.message}" if fault else "unknown"
        raise EngineError(f"all {len(failed)} episodes failed, the first by {reason}")
    if run.interrupted:
        console.print(f"to go on with the rest: turnwise rollout --resume {run.out}", soft_wrap=True, markup=False)
        return INTERRUPTED
    return OK


def names_of_files() -> Sequence[str]:
    """Return what a run writes, for tests and docs."""
    return (TRAJECTORIES_FILE, BATCH_FILE, METRICS_FILE, CONFIG_FILE)
