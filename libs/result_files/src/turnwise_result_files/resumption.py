"""Resuming a run from its folder: the finished episodes, and the remaining ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from attrs import evolve, field, frozen

from turnwise.errors import ConfigError, DataError, EngineError
from turnwise.files import PARTIAL, partial_path, replace
from turnwise.record.column_specs import NO_COLUMNS, ColumnSpec
from turnwise.record.ended import EndedEpisode
from turnwise.record.result import EpisodeResult
from turnwise.record.spec import EpisodeSpec, UnfinishedEpisode
from turnwise.record.trajectory import Trajectory
from turnwise.terminal import write_error
from turnwise.types import Status, Task, TokenArray
from turnwise_result_files.row_file import to_json
from turnwise_result_files.running_episodes import RUNNING_FILE
from turnwise_result_files.trajectories import TrajectoryWriter, read_results
from turnwise_result_files.unfinished import load_unfinished, save_unfinished

BATCH_FILE: Final = "batch.safetensors"
CONFIG_FILE: Final = "config.resolved.yaml"
EVALUATION_FILE: Final = "evaluation.json"
METRICS_FILE: Final = "metrics.json"
TRAJECTORIES_FILE: Final = "trajectories.parquet"
UNFINISHED_FILE: Final = "unfinished.jsonl"
_RESCUED: Final = "rescued-"


@frozen
class Earlier:
    """
    State of a run's episodes before it starts or resumes.

    Attributes:
        places: index of every episode of the run, by its name.
        finished: ended episodes.
        todo: the other episodes, at the point where they were interrupted.
        wall_s: wall-clock seconds of the earlier parts; None when one was killed, which leaves no record of it.
    """

    places: dict[str, int] = field(factory=dict)
    finished: tuple[EpisodeResult, ...] = ()
    todo: tuple[UnfinishedEpisode, ...] = ()
    wall_s: float | None = 0.0

    @classmethod
    def of(cls, specs: Sequence[EpisodeSpec]) -> Earlier:
        """Return the state before the first part of a run: every episode is still to do."""
        todo = tuple(UnfinishedEpisode(spec=spec, started=False) for spec in specs)
        return cls({spec.uid: place for place, spec in enumerate(specs)}, (), todo)

    def with_whole_groups(self, finished: Sequence[EpisodeResult], todo: Sequence[UnfinishedEpisode]) -> Earlier:
        """Return the state after ended members of groups that continue were taken back; see `GroupScoring.reopen`."""
        in_order = sorted(todo, key=lambda each: self.places[each.uid])
        return evolve(self, finished=tuple(finished), todo=tuple(in_order))

    def in_order(self, results: Sequence[EpisodeResult]) -> list[EpisodeResult]:
        """Return results in the order of the data set, an episode's newest one alone."""
        newest = {result.uid: result for result in results}
        return sorted(newest.values(), key=lambda result: self.places[result.uid])


def config_of(out: Path) -> Path:
    """Return the config of the run that a folder holds; `ConfigError` when it holds none."""
    if not (out / CONFIG_FILE).exists():
        raise ConfigError(f"--resume {out}: holds no run: {CONFIG_FILE} is missing; add the config to start one")
    return out / CONFIG_FILE


def earlier_run(
    out: Path,
    specs: Sequence[EpisodeSpec],
    decode: Callable[[TokenArray], str] | None,
    *,
    columns: Mapping[str, ColumnSpec] = NO_COLUMNS,
    retry_failed: bool = False,
) -> Earlier:
    """
    Read the state of a run that was interrupted or killed; the partial file of a killed one becomes complete.

    Episodes that failed by an engine or the infrastructure run again with `retry_failed`. Raises a `DataError` when a
    file cannot be read, or holds an episode that is none of the run's `specs`, of a task that has changed, or with
    another declaration of a column than the `columns` that plugins declare.
    """
    places = {spec.uid: place for place, spec in enumerate(specs)}
    if len(places) < len(specs):
        raise DataError(f"--resume {out}: two rows of the data set have one uid, so episodes cannot be told apart")
    ended = _finished(out, decode)
    earlier = Earlier(places, tuple(each for each in ended if not (retry_failed and _failed_by_outage(each))))
    unfinished = load_unfinished(out / UNFINISHED_FILE) if (out / UNFINISHED_FILE).exists() else []
    started = [*((each.uid, each.task) for each in ended), *((each.uid, each.spec.task) for each in unfinished)]
    for uid, _task in started:
        if uid not in places:
            raise DataError(f"--resume {out}: episode {uid!r} is none of this run's: has its data set changed?")
    # In the order of the data set, as episodes end in any order: one folder then always gives one message.
    for uid, task in sorted(started, key=lambda each: places[each[0]]):
        if _content(task) != _content(specs[places[uid]].task):
            row = f"row {specs[places[uid]].task.sample_index}"
            raise DataError(f"--resume {out}: {row} has changed since episode {uid!r} ran: restore the data set")
    done, cut = {result.uid for result in earlier.finished}, {each.uid: each for each in unfinished}
    todo = [cut.get(s.uid) or UnfinishedEpisode(spec=s, started=False) for s in specs if s.uid not in done]
    _check_columns(out, earlier.finished, [cut[each.uid] for each in todo if each.uid in cut], columns if todo else {})
    return Earlier(places, earlier.finished, tuple(todo), _spent_s(out))


def _check_columns(
    out: Path,
    finished: Sequence[EpisodeResult],
    unfinished: Sequence[UnfinishedEpisode],
    columns: Mapping[str, ColumnSpec],
) -> None:
    """Raise `DataError` where the batch of the whole run would hold two declarations of a column."""
    known = dict(columns)
    found = [(each.uid, spec) for each in finished for spec in _declarations(each.trajectories)]
    for each in unfinished:
        found += [(each.uid, spec) for spec in _declarations(each.trajectories)]
        found += [(each.uid, spec) for turn in each.turns for spec in turn.specs.values()]
        if isinstance(each, EndedEpisode):
            found += [(each.uid, spec) for spec in _declarations(each.result.trajectories)]
    for uid, spec in found:
        if known.setdefault(spec.name, spec) != spec:
            raise DataError(
                f"--resume {out}: episode {uid!r} has the column {spec.name!r} in another declaration than the"
                f" installed plugin or another episode: {spec} and {known[spec.name]}; install the version of the"
                " plugin that the run started with, or start another run"
            )


def _declarations(records: Iterable[Trajectory]) -> Iterator[ColumnSpec]:
    return (spec for record in records for spec in record.columns.values())


def _content(task: Task) -> str:
    """Return what an episode was made from, as the results hold it."""
    values = [to_json(each) for each in (task.messages, task.ground_truth, task.extra)]
    return json.dumps([task.data_source, *values], sort_keys=True)


def refuse_failures(results: Sequence[EpisodeResult], again: str = "") -> None:
    """
    Raise `EngineError` for a run that failed as a whole; print a line for lost episodes that can run again.

    Args:
        results: of the whole run.
        again: the command that runs the lost episodes again; empty if no folder keeps the others.
    """
    failed = [result for result in results if result.status is Status.FAILED]
    lost = [result for result in failed if _failed_by_outage(result)]
    if failed and (len(failed) == len(results) or 2 * len(lost) > len(results)):
        fault = (lost or failed)[0].fault
        reason = f"{fault.owner}: {fault.kind}: {fault.message}" if fault else "unknown"
        count = "all" if len(failed) == len(results) else f"{len(failed)} of"
        hint = f"; to run the lost ones again: {again}" if lost and again else ""
        raise EngineError(f"{count} {len(results)} episodes failed, the first by {reason}{hint}")
    if lost and again:
        write_error(f"turnwise: {len(lost)} episodes were lost by the engine or the infrastructure; again: {again}\n")


def _failed_by_outage(result: EpisodeResult) -> bool:
    return result.status is Status.FAILED and result.fault is not None and result.fault.owner in ("engine", "infra")


def _spent_s(out: Path) -> float | None:
    """Return the wall-clock seconds of a run so far; None when its last part was killed."""
    try:
        spent = json.loads((out / METRICS_FILE).read_text(encoding="utf-8"))["wall_s"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return spent if isinstance(spent, int | float) else None


def _finished(out: Path, decode: Callable[[TokenArray], str] | None) -> list[EpisodeResult]:
    """Return the ended episodes, and turn the partial file of a killed writer into a complete one."""
    complete, partial = out / TRAJECTORIES_FILE, out / f"{TRAJECTORIES_FILE}{PARTIAL}"
    found = [result for path in (complete, partial) if path.exists() for result in read_results(path)]
    finished = list({result.uid: result for result in found if result.status is not Status.ABORTED}.values())
    if partial.exists():
        rescued = out / f"{_RESCUED}{TRAJECTORIES_FILE}"
        with TrajectoryWriter(rescued, decode=decode) as writer:
            for result in finished:
                writer.write(result)
        replace(rescued, complete)
        partial.unlink()
    return finished


def remove_leftovers(out: Path) -> None:
    """Remove the files that only a part that was killed leaves behind; none of them holds the only copy of anything."""
    rescued = f"{_RESCUED}{TRAJECTORIES_FILE}"
    names = [RUNNING_FILE, f"{TRAJECTORIES_FILE}.complete", rescued, f"{rescued}.complete", f"{rescued}{PARTIAL}"]
    whole = (RUNNING_FILE, BATCH_FILE, CONFIG_FILE, EVALUATION_FILE, METRICS_FILE, UNFINISHED_FILE)
    for path in (*(out / name for name in names), *(partial_path(out / name) for name in whole)):
        path.unlink(missing_ok=True)
    for path in out.glob(".tmp??????"):  # `safetensors` gives its files such names while it writes them
        path.unlink()


def keep_unfinished(out: Path, unfinished: Sequence[UnfinishedEpisode]) -> None:
    """Write the unfinished episodes that started, or remove the file of an earlier part when there are none."""
    if started := [each for each in unfinished if each.started]:
        save_unfinished(out / UNFINISHED_FILE, started)
    else:
        (out / UNFINISHED_FILE).unlink(missing_ok=True)
