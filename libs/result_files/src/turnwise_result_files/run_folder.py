"""Rolls out tasks into a folder, so that an interrupted or killed run can be resumed from there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, Literal

from attrs import define, evolve, field

from turnwise import Host, RolloutManager, RunConfig, Task, handle_interrupts
from turnwise.batch.packed_arrays import pack_arrays
from turnwise.batch.padding import Widths
from turnwise.collector import freeze_start, full_collections_on_growth
from turnwise.config.file import dump_yaml, with_absolute_paths
from turnwise.config.models import pin_models
from turnwise.config.parts import Choice
from turnwise.console import Console
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.files import PARTIAL, write_text
from turnwise.record.result import EpisodeResult
from turnwise.terminal import write_error
from turnwise.types import JsonDict, Status
from turnwise_result_files.batch_file import save_arrays
from turnwise_result_files.folder_lock import check_replaceable, make_folder, removed_folder, writing_to
from turnwise_result_files.media import MediaFolder
from turnwise_result_files.progress import Tally, progress_view
from turnwise_result_files.resumption import (
    BATCH_FILE,
    CONFIG_FILE,
    EVALUATION_FILE,
    METRICS_FILE,
    TRAJECTORIES_FILE,
    UNFINISHED_FILE,
    Earlier,
    earlier_run,
    keep_unfinished,
    remove_leftovers,
)
from turnwise_result_files.running_episodes import RUNNING_FILE, RunningEpisodes
from turnwise_result_files.summary import summarize, write_metrics
from turnwise_result_files.trajectories import TrajectoryWriter

_RESULTS: Final = (
    *(TRAJECTORIES_FILE, f"{TRAJECTORIES_FILE}{PARTIAL}", BATCH_FILE),
    *(METRICS_FILE, UNFINISHED_FILE, EVALUATION_FILE),
)
_OTHER_FILES: Final = (CONFIG_FILE, RUNNING_FILE, f"{RUNNING_FILE}{PARTIAL}")
"""Files of a run that refer to no picture."""
Existing = Literal["refuse", "overwrite", "resume", "retry_failed"]
"""
Treatment of results that a folder holds: raise an error, replace them once there are new ones, keep the finished
episodes and run the others, or also run those again that failed by an engine or the infrastructure.
"""


def run_in_folder(
    out: Path,
    config: RunConfig,
    host: Host,
    tasks: Sequence[Task],
    existing: Existing = "refuse",
    observers: Sequence[Choice] = (),
) -> FolderRun:
    """
    Roll out tasks and write trajectories, batch, metrics and the config to a folder.

    The first Ctrl-C, SIGTERM or SIGHUP stops the running episodes and writes all finished ones; a second one stops
    waiting.

    Args:
        out: folder of the run; made if it is missing.
        config: resolved config, whose `rollout` has the step and whether the tasks are held out.
        host: loaded plugins.
        tasks: the tasks of the run; an invalid row raises before an engine starts.
        existing: how to treat results that the folder holds.
        observers: observers of this part of the run, which are not written to the folder's config.

    Returns:
        The ended run, with its episodes in the order of the tasks.

    Raises:
        ConfigError: the folder cannot be made, another process writes to it, or it holds another run's results.
        DataError: its files cannot be read or written, or belong to other tasks.
        TurnwiseError: there is no result that could replace the old ones, which stay.
        KeyboardInterrupt: the same after an interrupt.
    """
    resume, retry_failed = existing in ("resume", "retry_failed"), existing == "retry_failed"
    tally = Tally()
    config = pin_models(config, host, weights=False)
    observed = evolve(config, observers=(*config.observers, *observers)) if observers else config
    manager = RolloutManager.from_config(observed, host, observers=[tally, RunningEpisodes(out)])
    step, validation = config.rollout.global_step, config.rollout.validation
    specs = manager.plan.specs(tasks, global_step=step, validation=validation)
    decode = manager.chat.tokenizer.decode if manager.chat else None
    if not resume:  # a run that has begun has measured them
        manager.check_prompts(tasks, key="data.validation_path" if validation else "data.path")
        make_folder(out)
    with writing_to(out, f"--resume {out} continues from the written episodes"):
        if resume:
            remove_leftovers(out)
            earlier = earlier_run(out, specs, decode, columns=manager.plan.columns, retry_failed=retry_failed)
            run = FolderRun(manager, tally, out, _with_whole_groups(earlier, manager))
            if not run.earlier.todo:
                run.complete()
                return run
        else:
            text = dump_yaml(with_absolute_paths(config))
            run = FolderRun(manager, tally, out, Earlier.of(specs), text, overwrite=existing == "overwrite")
        with _running(run):
            todo = run.earlier.todo
            episodes = manager.iterate_numbered([], global_step=step, validation=validation, resume=todo)
            with handle_interrupts(partial(_stop, run, episodes.close)):
                run.collect(episodes)
        run.refuse_removed()
    return run


def _with_whole_groups(earlier: Earlier, manager: RolloutManager) -> Earlier:
    """Return the state after ended members of groups that continue were taken back, if the run scores groups."""
    if manager.groups is None:
        return earlier
    return earlier.with_whole_groups(*manager.groups.reopen(earlier.finished, earlier.todo))


@define(eq=False)
class FolderRun:
    """
    A running rollout in a locked folder: shows progress, writes finished episodes, and survives an interrupt.

    Attributes:
        config: resolved config that is still to be written; None when the folder holds it.
        overwrite: results of another run are replaced, once there are new ones; without it they raise `ConfigError`.
        results: newest result of each episode, in the order of the tasks.
        stop_requested: whether Ctrl-C, SIGTERM or SIGHUP asked this part to stop.
        was_complete: the folder had all files of the run already.
        summary: the content of the metrics file.
    """

    manager: RolloutManager
    tally: Tally
    out: Path
    earlier: Earlier
    config: str | None = None
    overwrite: bool = False
    results: list[EpisodeResult] = field(factory=list)
    stop_requested: bool = False
    was_complete: bool = False
    summary: JsonDict = field(factory=dict)
    _num_left: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        if self.config is not None and not self._old_results():
            self._replace_old_results()
        elif self.config is not None and not self.overwrite:
            text = "holds the results of another run; choose another folder or add --overwrite"
            raise ConfigError(f"--out {self.out}: {text}")
        else:
            check_replaceable(self.out, self._old_results() if self.config is not None else (), CONFIG_FILE)

    @property
    def interrupted(self) -> bool:
        """Whether a signal has cut this part off; one behind the last episode has cut nothing off."""
        return self.stop_requested and self._num_left > 0

    def _old_results(self) -> list[Path]:
        return [path for name in _RESULTS if (path := self.out / name).exists()]

    def _replace_old_results(self) -> None:
        """Remove the results of another run and write this run's config; do nothing the second time."""
        if self.config is not None:
            old = self._old_results()
            for path in old:
                path.unlink()
            # Any other file, such as one of `turnwise convert`, may refer to the same pictures.
            if old and all(path.is_dir() or path.name in _OTHER_FILES for path in self.out.iterdir()):
                MediaFolder(self.out).remove()
            write_text(self.out / CONFIG_FILE, self.config)
            self.config = None

    def refuse_removed(self) -> None:
        """Raise `DataError` when the folder was removed: the run would end without it, or with a part of it."""
        if self.config is None and not (self.out / CONFIG_FILE).exists():
            raise removed_folder(self.out)

    def _refuse_to_replace(self) -> None:
        """Raise for a run that ended without a result while the folder holds the results of another one."""
        if self.config is None:
            return
        if self.stop_requested:
            raise KeyboardInterrupt
        dropped = self.tally.num_dropped
        reason = f"all {dropped} episodes were dropped: their prompts are too long" if dropped else "no episode started"
        raise TurnwiseError(f"{reason}; {self.out} keeps its earlier results")

    def collect(self, episodes: Iterator[tuple[int, EpisodeResult]]) -> None:
        """Take every episode, write it, and then the batch and the metrics."""
        self.refuse_removed()  # the writer would make the folder anew
        started = time.perf_counter()
        chat = self.manager.chat
        if self.config is None:
            for name in (METRICS_FILE, EVALUATION_FILE):  # are there again when this part has not been killed
                (self.out / name).unlink(missing_ok=True)
        results = list(self.earlier.finished)
        with (
            TrajectoryWriter(self.out / TRAJECTORIES_FILE, decode=chat.tokenizer.decode if chat else None) as writer,
            progress_view(self.tally, len(self.earlier.todo), Console(stderr=True)) as update,
        ):
            for result in self.earlier.finished:
                writer.write(result)
            for _number, result in episodes:
                self.refuse_removed()
                if result.status is not Status.ABORTED or result.trajectories:  # an episode that started
                    self._replace_old_results()
                    results.append(writer.write(result))
                update()
            self._refuse_to_replace()
        self.refuse_removed()
        ended = {each.uid for each in results if each.status is not Status.ABORTED}
        self._num_left = len(self.earlier.places) - len(ended) - self.tally.num_dropped
        keep_unfinished(self.out, self.manager.unfinished)
        spent_s = self.earlier.wall_s
        self._summarize(results, None if spent_s is None else spent_s + time.perf_counter() - started)

    def complete(self) -> None:
        """Write the batch and the metrics of a run that was killed after its last episode."""
        if (self.out / METRICS_FILE).exists():
            self.results, self.was_complete = self.earlier.in_order(self.earlier.finished), True
            return
        keep_unfinished(self.out, ())
        self._summarize(self.earlier.finished, self.earlier.wall_s)

    def _summarize(self, results: Sequence[EpisodeResult], wall_s: float | None) -> None:
        self.results = self.earlier.in_order(results)
        self.summary = summarize(self.results, wall_s=wall_s)
        self.summary["interrupted"] = self.interrupted
        self.summary["not_started"] = sum(not each.started for each in self.manager.unfinished)
        self.summary["dropped"] = self.tally.num_dropped
        if self.results:
            self._save_batch()
        # The last file: where it exists, all others are complete.
        write_metrics(self.out / METRICS_FILE, self.summary)

    def _save_batch(self) -> None:
        plan, path = self.manager.plan, self.out / BATCH_FILE
        widths = Widths(prompt_length=plan.prompt_length, response_length=plan.response_length)
        if plan.postprocessors:  # they take tensors
            from turnwise_result_files.batches import save_batch  # loads torch, which takes seconds

            save_batch(self.manager.collate_packed(self.results), path, **widths)
        else:
            save_arrays(pack_arrays(self.results), path, pad_token_id=plan.pad_token_id, **widths)


def _stop(run: FolderRun, stop_waiting: Callable[[], None]) -> None:
    """Ask the episodes to stop; the second time, stop waiting for them. Raises nothing, so no file is left half."""
    if run.stop_requested:
        stop_waiting()
        return
    run.stop_requested = True
    text = "interrupted: saving finished episodes; press Ctrl-C again to exit without waiting"
    with suppress(OSError, RuntimeError):  # Ctrl-C ends the reader of a pipe too, or interrupts another write
        write_error(f"\nturnwise: {text}\n")
    run.manager.abort()


@contextmanager
def _running(run: FolderRun) -> Iterator[None]:
    """Start and stop the manager; an interrupt of its end costs no result, because all of them are written."""
    try:
        with run.manager:
            freeze_start()
            try:
                with full_collections_on_growth():
                    yield
            except BaseException:  # such as a full disk: nobody takes the other episodes, so they need not run
                run.manager.abort()
                raise
    except KeyboardInterrupt:
        if not run.summary:
            raise
