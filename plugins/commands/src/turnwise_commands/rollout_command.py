"""`turnwise rollout`: runs a config's tasks and writes trajectories, batch and metrics."""

from __future__ import annotations

import argparse
import errno
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from attrs import define, evolve, field
from rich.console import Console

from turnwise import RolloutManager, load_tasks
from turnwise.config.file import dump_yaml, with_absolute_paths
from turnwise.config.parts import Choice
from turnwise.config.resolve import load_resolved
from turnwise.config.run import RunConfig
from turnwise.errors import ConfigError, DataError, EngineError, PluginError, TurnwiseError
from turnwise.events.logging import configure_logging
from turnwise.files import PARTIAL, FolderLockedError, lock_folder, write_text
from turnwise.plugin.host import Host
from turnwise.protocols.command import INTERRUPTED, OK
from turnwise.record.result import EpisodeResult
from turnwise.types import JsonDict, Status
from turnwise_commands.display import results_table, summary_table
from turnwise_commands.progress import Tally, progress_view
from turnwise_commands.resumption import (
    CONFIG_FILE,
    METRICS_FILE,
    TRAJECTORIES_FILE,
    UNFINISHED_FILE,
    Earlier,
    config_of,
    earlier_run,
    keep_unfinished,
)
from turnwise_result_files import TrajectoryWriter, summarize, write_metrics

_TRACE_OBSERVER: Final = "trace_file"
BATCH_FILE: Final = "batch.safetensors"
_SHOWN_EPISODES: Final = 20
_DISK_ERRORS: Final = frozenset(
    {errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENAMETOOLONG, errno.ENOSPC, errno.EPERM, errno.EROFS}
)


class RolloutCommand:
    """Run tasks through agents and keep their trajectories."""

    help = "run the tasks of a config and write trajectories, a batch and metrics"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = (
            "Examples:\n"
            "  turnwise rollout run.yaml --out runs/first\n"
            "  turnwise rollout run.yaml rollout.n=8 rollout.seed=1 --out runs/groups\n"
            "  turnwise rollout run.yaml --out runs/traced --trace runs/traced/trace.json\n\n"
            f"Writes {TRAJECTORIES_FILE}, {BATCH_FILE}, {METRICS_FILE} and {CONFIG_FILE}. Ctrl-C or SIGTERM stops\n"
            f"the running episodes, writes all finished ones, and saves the others to {UNFINISHED_FILE}; a second\n"
            "one exits without waiting. --resume DIR continues a run that was interrupted or killed: finished\n"
            "episodes are kept, and the others run to their end. With --retry-failed, episodes that failed by an\n"
            "engine or by the infrastructure run again as well.\n"
            "Exit codes: 0; 2 for a bad config or bad input; 130 after an interrupt; 1 when every episode failed, or\n"
            "most of them by the engine or the infrastructure."
        )
        parser.add_argument("config", nargs="?", help="YAML or TOML file")
        parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="set a value, such as rollout.n=4")
        parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results; created when missing")
        parser.add_argument("--resume", type=Path, metavar="DIR", help="continue the run in DIR")
        parser.add_argument("--retry-failed", action="store_true", help="with --resume: run such episodes again")
        parser.add_argument("--overwrite", action="store_true", help="replace the results that DIR holds")
        parser.add_argument("--trace", type=Path, metavar="FILE", help="draw the run for https://ui.perfetto.dev")

    def run(self, arguments: argparse.Namespace) -> int:
        resuming = _resuming(arguments)
        source = str(config_of(arguments.resume)) if resuming else arguments.config
        config, host = load_resolved(source, arguments.overrides)
        configure_logging(config.telemetry.log_level, config.telemetry.log_format)
        tally = Tally()
        traced = config if arguments.trace is None else _with_trace(config, host, arguments.trace)
        manager = RolloutManager.from_config(traced, host, observers=[tally])
        step, validation = config.rollout.global_step, config.rollout.validation
        # A bad row is refused before an engine starts.
        specs = manager.plan.specs(load_tasks(config), global_step=step, validation=validation)
        decode = manager.chat.tokenizer.decode if manager.chat else None
        out = arguments.resume if resuming else _make_folder(arguments.out)
        with _writing_to(out):
            if resuming:
                earlier = earlier_run(out, specs, decode, retry_failed=arguments.retry_failed)
                run = _Run(manager, tally, out, earlier)
                if not earlier.todo:
                    return run.complete()
            else:
                text = dump_yaml(with_absolute_paths(config))
                run = _Run(manager, tally, out, Earlier.of(specs), text, overwrite=arguments.overwrite)
            with manager:
                todo = run.earlier.todo
                episodes = manager.iterate_numbered([], global_step=step, validation=validation, resume=todo)
                with _interrupts(run, episodes.close):
                    run.collect(episodes)
        return _finish(run)


def _with_trace(config: RunConfig, host: Host, file: Path) -> RunConfig:
    """Return the config with a trace file among its observers; `ConfigError` if no plugin registers it."""
    try:
        host.entry("observers", _TRACE_OBSERVER)
    except PluginError as error:
        raise ConfigError(f"--trace {file}: {error}") from error
    return evolve(config, observers=(*config.observers, Choice(_TRACE_OBSERVER, {"path": str(file)})))


def _resuming(arguments: argparse.Namespace) -> bool:
    """Return whether to resume an earlier run; `ConfigError` for options that exclude each other."""
    if arguments.resume is None:
        if arguments.retry_failed:
            raise ConfigError("--retry-failed needs --resume DIR")
        if arguments.config is None or arguments.out is None:
            raise ConfigError("give a config and --out DIR, or --resume DIR")
        return False
    if arguments.config is not None or arguments.out is not None or arguments.overwrite:
        raise ConfigError("--resume DIR uses the config of that run: give no config, no --out and no --overwrite")
    return True


def _make_folder(out: Path) -> Path:
    """Return the folder for results, made if it is missing."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error
    return out


@contextmanager
def _writing_to(out: Path) -> Iterator[None]:
    """Keep other runs out of the folder, and report that, or a full or read-only disk, in one line."""
    try:
        with lock_folder(out):
            yield
    except FolderLockedError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        remedy = f"--resume {out} continues from the written episodes"
        raise DataError(f"{out}: cannot be written: {error.strerror}; {remedy}") from error


@define(eq=False)
class _Run:
    """
    A running rollout in a locked folder: shows progress, writes finished episodes, and survives an interrupt.

    Attributes:
        config: resolved config that is still to be written; None when the folder holds it.
        overwrite: results of another run are replaced, once there are new ones; without it they raise `ConfigError`.
    """

    manager: RolloutManager
    tally: Tally
    out: Path
    earlier: Earlier
    config: str | None = None
    overwrite: bool = False
    results: list[EpisodeResult] = field(factory=list)
    interrupted: bool = False
    summary: JsonDict = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.config is not None and not self._old_results():
            self._replace_old_results()
        elif self.config is not None and not self.overwrite:
            text = "holds the results of another run; choose another folder or add --overwrite"
            raise ConfigError(f"--out {self.out}: {text}")

    def _old_results(self) -> list[Path]:
        names = (TRAJECTORIES_FILE, f"{TRAJECTORIES_FILE}{PARTIAL}", BATCH_FILE, METRICS_FILE, UNFINISHED_FILE)
        return [path for name in names if (path := self.out / name).exists()]

    def _replace_old_results(self) -> None:
        """Remove the results of another run and write this run's config; do nothing the second time."""
        if self.config is not None:
            for path in self._old_results():
                path.unlink()
            write_text(self.out / CONFIG_FILE, self.config)
            self.config = None

    def collect(self, episodes: Iterator[tuple[int, EpisodeResult]]) -> None:
        """Take every episode, write it, and then the batch and the metrics."""
        started = time.perf_counter()
        chat = self.manager.chat
        if self.config is None:
            (self.out / METRICS_FILE).unlink(missing_ok=True)  # is there again when this part has not been killed
        results = list(self.earlier.finished)
        with (
            TrajectoryWriter(self.out / TRAJECTORIES_FILE, decode=chat.tokenizer.decode if chat else None) as writer,
            progress_view(self.tally, len(self.earlier.todo), Console(stderr=True)) as update,
        ):
            for result in self.earlier.finished:
                writer.write(result)
            for _number, result in episodes:
                if result.status is not Status.ABORTED or result.trajectories:  # an episode that started
                    self._replace_old_results()
                    results.append(writer.write(result))
                update()
            self._replace_old_results()
        keep_unfinished(self.out, self.manager.unfinished)
        spent_s = self.earlier.wall_s
        self._summarize(results, None if spent_s is None else spent_s + time.perf_counter() - started)

    def complete(self) -> int:
        """Write the batch and the metrics of a run that was killed after its last episode; return the exit code."""
        if (self.out / METRICS_FILE).exists():
            text = f"turnwise: {self.out}: all {len(self.earlier.finished)} episodes have finished\n"
            sys.stderr.write(text)
            return OK
        keep_unfinished(self.out, ())
        self._summarize(self.earlier.finished, self.earlier.wall_s)
        return _finish(self)

    def _summarize(self, results: Sequence[EpisodeResult], wall_s: float | None) -> None:
        self.results = self.earlier.in_order(results)
        self.summary = summarize(self.results, wall_s=wall_s)
        self.summary["interrupted"] = self.interrupted
        self.summary["not_started"] = sum(not each.started for each in self.manager.unfinished)
        self.summary["dropped"] = self.tally.num_dropped
        if self.results:
            plan = self.manager.plan
            batch = self.manager.collate_packed(self.results)
            batch.save(self.out / BATCH_FILE, prompt_length=plan.prompt_length, response_length=plan.response_length)
        # The last file: where it exists, all others are complete.
        write_metrics(self.out / METRICS_FILE, self.summary)


@contextmanager
def _interrupts(run: _Run, stop_waiting: Callable[[], None]) -> Iterator[None]:
    """
    Handle Ctrl-C and SIGTERM: the first asks the episodes to stop, the second stops waiting for them.

    The handler raises nothing, so an interrupt can neither lose an episode nor break a file.
    """

    def handle(_signal: int, _frame: FrameType | None) -> None:
        if run.interrupted:
            stop_waiting()
            return
        run.interrupted = True
        text = "interrupted: saving finished episodes; press Ctrl-C again to exit without waiting"
        sys.stderr.write(f"\nturnwise: {text}\n")
        run.manager.abort()

    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield
        return
    before = {each: signal.signal(each, handle) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _finish(run: _Run) -> int:
    """Print the tables and return the exit code."""
    console = Console()
    console.print(summary_table(run.summary))
    hint = f"; to look at one episode: turnwise show {run.out} 0" if run.results else ""
    console.print(f"wrote {run.out}{hint}", soft_wrap=True, markup=False)
    if run.summary["dropped"] and not run.results:
        raise TurnwiseError(f"all {run.summary['dropped']} episodes were dropped: their prompts are too long")
    console.print(results_table(run.results, limit=_SHOWN_EPISODES))
    failed = [result for result in run.results if result.status is Status.FAILED]
    lost = [result for result in failed if result.fault and result.fault.owner in ("engine", "infra")]
    if failed and (len(failed) == len(run.results) or 2 * len(lost) > len(run.results)):
        fault = (lost or failed)[0].fault
        reason = f"{fault.owner}: {fault.kind}: {fault.message}" if fault else "unknown"
        count = "all" if len(failed) == len(run.results) else f"{len(failed)} of"
        raise EngineError(f"{count} {len(run.results)} episodes failed, the first by {reason}")
    if run.interrupted:
        console.print(f"to run the rest: turnwise rollout --resume {run.out}", soft_wrap=True, markup=False)
        return INTERRUPTED
    return OK
