"""What an earlier run left in its folder: the episodes that finished, and those that are still to do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from attrs import field, frozen

from turnwise.episode_spec import EpisodeSpec, UnfinishedEpisode
from turnwise.errors import ConfigError, DataError
from turnwise.result import EpisodeResult
from turnwise.row_file import PARTIAL
from turnwise.storage import TrajectoryWriter, read_results
from turnwise.types import Status, TokenArray
from turnwise.unfinished_file import load_unfinished, save_unfinished

CONFIG_FILE: Final = "config.resolved.yaml"
METRICS_FILE: Final = "metrics.json"
TRAJECTORIES_FILE: Final = "trajectories.parquet"
UNFINISHED_FILE: Final = "unfinished.jsonl"


@frozen
class Earlier:
    """
    What there is of a run's episodes before it begins, or goes on.

    Attributes:
        places: of every episode of the run, by its name.
        finished: those that ended.
        todo: the others, from where they were cut.
        wall_s: seconds that the earlier parts took by the clock; None where one was killed, and nobody knows.
    """

    places: dict[str, int] = field(factory=dict)
    finished: tuple[EpisodeResult, ...] = ()
    todo: tuple[UnfinishedEpisode, ...] = ()
    wall_s: float | None = 0.0

    @classmethod
    def of(cls, specs: Sequence[EpisodeSpec]) -> Earlier:
        """Return what there is before the first part of a run: all is to do."""
        todo = tuple(UnfinishedEpisode(spec=spec, began=False) for spec in specs)
        return cls({spec.uid: place for place, spec in enumerate(specs)}, (), todo)

    def in_order(self, results: Sequence[EpisodeResult]) -> list[EpisodeResult]:
        """Return results in the order of the data set, an episode's newest one alone."""
        newest = {result.uid: result for result in results}
        return sorted(newest.values(), key=lambda result: self.places[result.uid])


def config_of(out: Path) -> Path:
    """Return the config of the run that a folder holds; `ConfigError` when it holds none."""
    if not (out / CONFIG_FILE).exists():
        raise ConfigError(f"--resume {out}: holds no run: there is no {CONFIG_FILE}")
    return out / CONFIG_FILE


def earlier_run(out: Path, specs: Sequence[EpisodeSpec], decode: Callable[[TokenArray], str] | None) -> Earlier:
    """
    Read what a run left, also one that was killed.

    Args:
        out: its folder; what a killed run left there is made a complete file.
        specs: the episodes of the run, by its config.
        decode: gives the texts of records.

    Raises:
        DataError: a file cannot be read, or holds an episode that the run does not have.
    """
    places = {spec.uid: place for place, spec in enumerate(specs)}
    if len(places) < len(specs):
        raise DataError(f"--resume {out}: two rows of the data set have one uid, so episodes cannot be told apart")
    earlier = Earlier(places, tuple(_finished(out, decode)))
    unfinished = load_unfinished(out / UNFINISHED_FILE) if (out / UNFINISHED_FILE).exists() else []
    for uid in (*(result.uid for result in earlier.finished), *(each.uid for each in unfinished)):
        if uid not in places:
            raise DataError(f"--resume {out}: episode {uid!r} is none of this run's: has its data set changed?")
    done, cut = {result.uid for result in earlier.finished}, {each.uid: each for each in unfinished}
    todo = [cut.get(s.uid) or UnfinishedEpisode(spec=s, began=False) for s in specs if s.uid not in done]
    return Earlier(places, earlier.finished, tuple(todo), _spent_s(out))


def _spent_s(out: Path) -> float | None:
    """Return the seconds that the parts of a run took which came to their end; None when the last one was killed."""
    try:
        spent: float | None = json.loads((out / METRICS_FILE).read_text(encoding="utf-8"))["wall_s"]
    except (OSError, ValueError, KeyError):
        return None
    return spent


def _finished(out: Path, decode: Callable[[TokenArray], str] | None) -> list[EpisodeResult]:
    """Return the episodes that ended, and put what a killed writer left into a complete file."""
    complete, partial = out / TRAJECTORIES_FILE, out / f"{TRAJECTORIES_FILE}{PARTIAL}"
    found = [result for path in (complete, partial) if path.exists() for result in read_results(path)]
    finished = list({result.uid: result for result in found if result.status is not Status.ABORTED}.values())
    if partial.exists():
        rescued = out / f"rescued-{TRAJECTORIES_FILE}"
        with TrajectoryWriter(rescued, decode=decode) as writer:
            for result in finished:
                writer.write(result)
        os.replace(rescued, complete)
        partial.unlink()
    return finished


def keep_unfinished(out: Path, unfinished: Sequence[UnfinishedEpisode]) -> None:
    """Write what is left of episodes that began, or remove what an earlier part of the run had left of some."""
    if begun := [each for each in unfinished if each.began]:
        save_unfinished(out / UNFINISHED_FILE, begun)
    else:
        (out / UNFINISHED_FILE).unlink(missing_ok=True)
