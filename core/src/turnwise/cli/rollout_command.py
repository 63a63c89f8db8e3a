"""`turnwise rollout`: run a config's tasks and write what came of them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import structlog
from rich.console import Console

from turnwise.cli.exit_codes import FAILED, OK
from turnwise.cli.progress import Tally, progress_view
from turnwise.config_file import dump_yaml, load_config
from turnwise.display import results_table, summary_table
from turnwise.errors import ConfigError, EngineError
from turnwise.host import resolve
from turnwise.result import EpisodeResult
from turnwise.runtime.assembly import host_of, manager_of, tasks_of
from turnwise.runtime.manager import RolloutManager
from turnwise.storage import TrajectoryWriter
from turnwise.summary import summarize, write_metrics
from turnwise.telemetry import configure_logging
from turnwise.types import Status, Task

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
        config = load_config(arguments.config, arguments.overrides)
        configure_logging(config.telemetry.log_level, config.telemetry.log_format)
        host = host_of(config)
        config = resolve(config, host)
        tasks = tasks_of(config)
        tally = Tally()
        manager = manager_of(config, host, observers=[tally])
        total = len(manager.plan.specs(tasks, global_step=0, validation=config.rollout.validation))
        out = _prepared(arguments.out, overwrite=arguments.overwrite)
        (out / CONFIG_FILE).write_text(dump_yaml(config), encoding="utf-8")
        with manager:
            episodes = manager.iterate(
                tasks, global_step=config.rollout.global_step, validation=config.rollout.validation
            )
            outcome = _Run(manager, tally, total, out).collect(episodes, tasks)
        return _finish(outcome, out)


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

    def __init__(self, manager: RolloutManager, tally: Tally, total: int, out: Path) -> None:
        self.manager = manager
        self.tally = tally
        self.total = total
        self.out = out
        self.results: list[EpisodeResult] = []
        self.interrupted = False
        self.summary: dict[str, Any] = {}

    def collect(self, episodes: Iterator[EpisodeResult], tasks: Sequence[Task]) -> _Run:
        """Take every episode, write it, and then the batch and the metrics."""
        started = time.perf_counter()
        chat = self.manager.chat
        console = Console(stderr=True)
        with (
            TrajectoryWriter(self.out / TRAJECTORIES_FILE, decode=chat.tokenizer.decode if chat else None) as writer,
            progress_view(self.tally, self.total, console) as view,
        ):
            for result in self._survivors(episodes):
                writer.write(result)
                self.results.append(result)
                view.update()
        place = {task.uid: index for index, task in enumerate(tasks)}
        self.results.sort(key=lambda result: (place[result.task.uid], result.rollout_n))
        self.summary = summarize(self.results, wall_s=time.perf_counter() - started)
        self.summary["interrupted"] = self.interrupted
        write_metrics(self.out / METRICS_FILE, self.summary)
        if self.results:
            self.manager.collate(self.results).save(self.out / BATCH_FILE)
        return self

    def _survivors(self, episodes: Iterator[EpisodeResult]) -> Iterator[EpisodeResult]:
        """Yield what has a record or a fault of its own; the first interrupt asks the rest to stop."""
        while True:
            try:
                result = next(episodes)
            except StopIteration:
                return
            except KeyboardInterrupt:
                if self.interrupted:
                    return
                self.interrupted = True
                structlog.get_logger().warning("interrupted: keeping what there is; again to stop at once")
                self.manager.abort()
                continue
            if result.status is not Status.ABORTED or result.trajectories:
                yield result


def _finish(run: _Run, out: Path) -> int:
    """Print the tables and return the exit code."""
    console = Console()
    console.print(results_table(run.results, limit=_SHOWN_EPISODES))
    console.print(summary_table(run.summary))
    console.print(f"wrote {out}", highlight=False)
    failed = [result for result in run.results if result.status is Status.FAILED]
    if run.results and len(failed) == len(run.results):
        fault = failed[0].fault
        reason = f"{fault.owner}: {fault.kind}: {fault.message}" if fault else "unknown"
        raise EngineError(f"all {len(failed)} episodes failed, the first by {reason}")
    return FAILED if run.interrupted else OK


def names_of_files() -> Sequence[str]:
    """Return what a run writes, for tests and docs."""
    return (TRAJECTORIES_FILE, BATCH_FILE, METRICS_FILE, CONFIG_FILE)
