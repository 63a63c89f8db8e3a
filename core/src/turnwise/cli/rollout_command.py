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

from turnwise.cli.exit_codes import FAILED, OK
from turnwise.cli.progress import Tally, progress_view
from turnwise.cli.resolved_config import load_resolved
from turnwise.config_file import anchored, dump_yaml
from turnwise.display import results_table, summary_table
from turnwise.errors import ConfigError, EngineError
from turnwise.result import EpisodeResult
from turnwise.runtime.assembly import manager_of, tasks_of
from turnwise.runtime.manager import FinishedEpisodes, RolloutManager
from turnwise.storage import TrajectoryWriter
from turnwise.summary import summarize, write_metrics
from turnwise.telemetry import configure_logging
from turnwise.types import Status

CONFIG_FILE: Final = "config.resolved.yaml"
TRAJECTORIES_FILE: Final = "trajectories.parquet"
BATCH_FILE: Final = "batch.safetensors"
METRICS_FILE: Final = "metrics.json"
_SHOWN_EPISODES: Final = 20


class RolloutCommand:
    """Run tasks through agents and keep their trajectories."""

    help = "run the tasks of a config and write trajectories, a batch and metrics"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare `CONFIG [a.b=c ...] --out DIR`."""
        parser.epilog = (
            "Examples:\n"
            "  turnwise rollout examples/calculator.yaml --out runs/first\n"
            "  turnwise rollout examples/calculator.yaml rollout.n=8 rollout.seed=1 --out runs/groups\n\n"
            f"Writes {TRAJECTORIES_FILE}, {BATCH_FILE}, {METRICS_FILE} and {CONFIG_FILE}. An interrupt (Ctrl-C) ends\n"
            "the running episodes and writes all that there is; a second one ends at once.\n"
            "Exit codes: 0; 2 for a bad config or bad input; 1 when it was interrupted or every episode failed."
        )
        parser.add_argument("config", help="YAML or TOML file")
        parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="set a value, such as rollout.n=4")
        parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where to write; made when missing")
        parser.add_argument("--overwrite", action="store_true", help="replace the results that DIR holds")

    def run(self, arguments: argparse.Namespace) -> int:
        """Run, write and print a summary."""
        config, host = load_resolved(arguments.config, arguments.overrides)
        configure_logging(config.telemetry.log_level, config.telemetry.log_format)
        tasks = tasks_of(config)
        tally = Tally()
        manager = manager_of(config, host, observers=[tally])
        manager.plan.specs(tasks, global_step=0, validation=False)  # a bad row is refused before an engine starts
        out = _prepared(arguments.out, overwrite=arguments.overwrite)
        (out / CONFIG_FILE).write_text(dump_yaml(anchored(config)), encoding="utf-8")
        with manager:
            episodes = manager.numbered(
                tasks, global_step=config.rollout.global_step, validation=config.rollout.validation
            )
            run = _Run(manager, tally, out)
            with _interrupts(run, episodes):
                run.collect(episodes)
        return _finish(run)


def _prepared(out: Path, *, overwrite: bool) -> Path:
    """Return the folder, made and free of results; `ConfigError` when it holds some that may not be replaced."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: not a folder")
    old = [out / name for name in (TRAJECTORIES_FILE, BATCH_FILE, METRICS_FILE) if (out / name).exists()]
    if old and not overwrite:
        raise ConfigError(f"--out {out}: holds the results of another run; choose another folder or add --overwrite")
    out.mkdir(parents=True, exist_ok=True)
    for path in old:
        path.unlink()
    return out


class _Run:
    """A run under way: shows progress, writes what finishes, and survives an interrupt."""

    def __init__(self, manager: RolloutManager, tally: Tally, out: Path) -> None:
        self.manager = manager
        self.tally = tally
        self.out = out
        self.results: list[EpisodeResult] = []
        self.interrupted = False
        self.summary: dict[str, Any] = {}

    def collect(self, episodes: FinishedEpisodes) -> None:
        """Take every episode, write it, and then the batch and the metrics."""
        started = time.perf_counter()
        chat = self.manager.chat
        numbered: list[tuple[int, EpisodeResult]] = []
        with (
            TrajectoryWriter(self.out / TRAJECTORIES_FILE, decode=chat.tokenizer.decode if chat else None) as writer,
            progress_view(self.tally, episodes.total, Console(stderr=True)) as view,
        ):
            for number, result in episodes:
                if result.status is not Status.ABORTED or result.trajectories:  # an episode that began
                    writer.write(result)
                    numbered.append((number, result))
                view.update()
        self.results = [result for _number, result in sorted(numbered, key=lambda pair: pair[0])]
        self.summary = summarize(self.results, wall_s=time.perf_counter() - started)
        self.summary["interrupted"] = self.interrupted
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
    return FAILED if run.interrupted else OK


def names_of_files() -> Sequence[str]:
    """Return what a run writes, for tests and docs."""
    return (TRAJECTORIES_FILE, BATCH_FILE, METRICS_FILE, CONFIG_FILE)
