"""A run on disk: finds its files, and follows them while the run is in progress."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from attrs import define, field
from numpy.typing import NDArray

from turnwise.errors import DataError, describe
from turnwise.files import PARTIAL
from turnwise.media import Picture
from turnwise.types import JsonDict
from turnwise_result_files import find_rows, read_running
from turnwise_result_files.row_file import SUFFIXES
from turnwise_result_files.row_schema import SCHEMA, TRAINING_SCHEMA
from turnwise_result_files.running_episodes import RUNNING_FILE
from turnwise_result_files.trajectories import UNREADABLE
from turnwise_viewer.case_source import write_case
from turnwise_viewer.episode_index import EpisodeIndex, Filter
from turnwise_viewer.episode_pictures import describe_pictures, find_picture_file
from turnwise_viewer.episode_record import check_rows, describe_episode, describe_tokens, mean_advantage
from turnwise_viewer.file_states import FileStates, grew, read_states
from turnwise_viewer.row_groups import RowGroups, list_steps, open_groups, open_steps
from turnwise_viewer.text_search import Found, SearchedFile, TextSearch
from turnwise_viewer.token_text import TokenLimits, TokenTexts, find_decoder, find_limits
from turnwise_viewer.trace_slices import TRACE_FILE, read_timeline
from turnwise_viewer.training_metrics import METRICS_FILE

_STEM: Final = "trajectories"
_STEPS_FOLDER: Final = "episodes"
_TOKENIZERS: Final = threading.Lock()
"""One tokenizer is loaded at a time: two threads that import transformers at once break each other's import."""

_MAX_SEARCHES: Final = 4
"""Searches that are kept, so that several pages can search at once."""

_SEARCH_S: Final = 1.0
"""Longest work of a request for the hits of a page; then the hits so far are the answer."""


@define(eq=False)
class RunFolder:
    """
    The episodes of a run. Calls may come from several threads.

    Attributes:
        path: a folder that `turnwise rollout`, `train` or `gateway serve` wrote, or a file of episodes.
        name: for people.
    """

    path: Path
    name: str
    index: EpisodeIndex = field(factory=EpisodeIndex)
    _source: Path | None = None
    _identity: FileStates = ()
    _groups: RowGroups | None = None
    _texts: TokenTexts | None = None
    _texts_missing: str = ""
    _texts_loaded: bool = False
    _limits: TokenLimits | None = None
    _searches: dict[tuple[str, Filter], tuple[object, TextSearch]] = field(factory=dict)
    _last_read: tuple[object, pa.Table] | None = None
    """The groups of rows that were read last: a page asks for an episode and for its tokens."""
    _lock: threading.RLock = field(factory=threading.RLock)

    @classmethod
    def open(cls, path: Path, *, may_be_empty: bool = False) -> RunFolder:
        """
        Open a run.

        Args:
            path: see the class.
            may_be_empty: the run may start later; until then the path may be missing.

        Raises:
            DataError: the path is no run, or another version of turnwise wrote it.
        """
        run = cls(path, path.resolve().name)
        if not path.exists() and not may_be_empty:
            raise DataError(f"{path}: does not exist")
        if path.is_dir() and not may_be_empty and not any((path / name).exists() for name in _names()):
            raise DataError(f"{path}: holds no run: neither {_STEM}.parquet, {_STEM}.jsonl nor {METRICS_FILE}")
        try:
            run.refresh()
        except BaseException:
            run.close()
            raise
        return run

    @property
    def folder(self) -> Path:
        """The folder with the files of the run."""
        return self.path.parent if self.path.is_file() or self.path.suffix in (PARTIAL, *SUFFIXES) else self.path

    def refresh(self) -> bool:
        """Read what the run has written since the last call; return whether there is anything new."""
        with self._lock:
            source = self._find_source()
            identity = read_states(source)
            if source is None or not identity or (source, identity) == (self._source, self._identity):
                return False
            if source != self._source or not grew(self._identity, identity, is_stream=source.suffix == PARTIAL):
                try:
                    self._reopen(source)
                except DataError:
                    if read_states(source) == identity:
                        raise
                    return False  # the run replaced the file at this moment; the next call reads the new one
            # Without states the next call reads the files again, and so a page keeps the error.
            self._identity = ()
            assert self._groups is not None
            try:
                is_new = self.index.update(self._groups)
            except DataError:
                raise
            except UNREADABLE as error:
                raise DataError(f"{source}: cannot be read as episodes: {describe(error)}") from error
            self._identity = identity
            return is_new

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            self._stop_searches()
            if self._groups is not None:
                self._groups.close()

    @property
    def problem(self) -> str | None:
        """Files of episodes that are left out because they cannot be read; None if there are none."""
        return None if self._groups is None else self._groups.problem

    def describe(self) -> JsonDict:
        """Return the run as the API lists it."""
        running = read_running(self.folder)
        return {
            "name": self.name,
            "path": str(self.path),
            "num_episodes": len(self.index),
            "num_running": 0 if running is None else running["total"],
            "running_revision": "" if running is None else str(running["written_at"]),
            "has_started": self._source is not None or running is not None or (self.folder / METRICS_FILE).exists(),
            "is_partial": self._source is not None and self._source.suffix == PARTIAL,
            "revision": self._describe_revision(),
            "has_metrics": (self.folder / METRICS_FILE).exists(),
            "has_trace": (self.folder / TRACE_FILE).exists(),
        }

    def running(self) -> JsonDict:
        """Return the running episodes, the longest-running first, with the seconds since their start and last event."""
        found = read_running(self.folder)
        if found is None:
            return {"total": 0, "episodes": []}
        now = time.time()
        episodes = [
            {name: each[name] for name in ("key", "agent_name", "worker", "num_turns", "num_tokens", "last")}
            | {"seconds": max(0.0, now - each["started_at"]), "last_s": max(0.0, now - each["last_at"])}
            for each in found["episodes"]
        ]
        return {"total": found["total"], "episodes": episodes}

    def _describe_revision(self) -> str:
        """Return a text that changes when a file of the run changes."""
        others = [read_states(file) for name in (METRICS_FILE, TRACE_FILE) if (file := self.folder / name).exists()]
        return hashlib.sha256(repr((self._identity, others)).encode()).hexdigest()[:16]

    def search(self, text: str, wanted: Filter, num_hits: int, sort: str = "row", *, descending: bool = False) -> Found:
        """
        Return the episodes with a text, as far as they are known.

        Args:
            text: compared without regard to case.
            wanted: conditions on the episodes.
            num_hits: the first hits of the list, which are found first.
            sort: column that orders the list, see `EpisodeIndex.sort`.
            descending: whether the largest comes first.
        """
        with self._lock:
            numbers = self.index.select(wanted) if len(self.index) else np.zeros(0, np.int64)
            if self._source is None or not len(numbers):
                return Found(numbers)
            order = self.index.sort(numbers, sort, descending=descending)
            search = self._find_search(text, wanted, numbers)
        return search.find(order, num_hits, _SEARCH_S)

    def _find_search(self, text: str, wanted: Filter, numbers: NDArray[np.int64]) -> TextSearch:
        """Return the search for a text; one that the run has outgrown continues with the new episodes."""
        state = (len(self.index), self._identity)
        known, before = self._searches.pop((text, wanted), (None, None))
        if before is None or known != state:
            if before is not None:
                before.stop()
            assert self._source is not None
            file = SearchedFile(partial(_open_source, self._source), self.index)
            before = TextSearch(file, text, numbers, before)
        self._searches[text, wanted] = (state, before)
        if len(self._searches) > _MAX_SEARCHES:
            _state, oldest = self._searches.pop(next(iter(self._searches)))
            oldest.stop()
        return before

    def episode(self, key: str | int) -> JsonDict:
        """Return an episode without its tokens, by its key or by its number in the index."""
        with self._lock:
            number = self._number(key)
            name = self.index.table["key"][number].as_py()
            rows = self._read_whole(number)
        episode = describe_episode(rows)
        limits = self._token_limits().describe(validation=bool(episode["validation"]))
        return {"key": name, **episode, **limits, "pictures": describe_pictures(rows, self._media)}

    def picture(self, key: str | int, reference: str) -> Picture:
        """Return a picture of an episode; `DataError` for a reference that the episode has not, or a bad file."""
        with self._lock:
            rows = self._read_rows(self._number(key)).to_pylist()
        return find_picture_file(rows, self._media, reference)

    @property
    def _media(self) -> Path:
        """The folder with the folder `media` of the episodes."""
        source = self._source or self.path
        return source if source.is_dir() else source.parent

    def case(self, key: str | int) -> str:
        """Return an episode as the source of a test, by its key or by its number in the index."""
        with self._lock:
            rows = self._read_whole(self._number(key))
        return write_case(rows)

    def advantages(self, numbers: Sequence[int]) -> list[float | None]:
        """Return the mean advantage of each episode; None for an episode without a training step."""
        with self._lock:
            if self._groups is None or not self._groups.is_training:
                return [None] * len(numbers)
            columns = ("response_mask", "advantages")
            return [mean_advantage(self._read_rows(number, columns).to_pylist()) for number in numbers]

    def timeline(self, key: str = "", step: int | None = None) -> JsonDict | None:
        """
        Return the timeline of the run's trace, see `read_timeline`; None without a trace.

        Args:
            key: of the only episode that it shows.
            step: of the training, whose episodes it shows; -1 is the newest step.
        """
        with self._lock:
            names = self.index.table["key"].to_pylist() if len(self.index) else []
            attempts = self._read_attempts()
            steps = self.index.column("global_step") if len(self.index) else np.zeros(0, np.int64)
        wanted = None
        if key:
            wanted = {names[self._number(key)]}.__contains__
        elif step is not None and len(steps):
            numbers = np.flatnonzero(steps == (steps.max() if step < 0 else step))
            wanted = {names[number] for number in numbers.tolist()}.__contains__
        by_attempt, known = dict(zip(attempts, names, strict=True)), {*names}

        def find_key(arguments: Mapping[str, Any]) -> str | None:
            uid: str = arguments["uid"]
            # A trace of an earlier version has no keys of attempts.
            return by_attempt.get(arguments["key"]) if "key" in arguments else uid if uid in known else None

        timeline = read_timeline(self.folder, find_key, wanted)
        if timeline is not None and not timeline["rows"] and not key and step == -1:
            # A trace of an earlier version, or one of other episodes, has no newest step.
            timeline = read_timeline(self.folder, find_key, None)
        return timeline

    def _read_attempts(self) -> list[str | None]:
        """Return the key of each episode's attempt, which events and traces have."""
        if self._groups is None or not len(self.index):
            return []
        keys = self._groups.read(range(len(self.index.row_of_group) - 1), ("key",))["key"]
        attempts: list[str | None] = keys.take(pa.array(self.index.column("row"))).to_pylist()
        return attempts

    def tokens(self, key: str | int, record: int) -> JsonDict:
        """Return the columns of a record's tokens, by the episode's key or by its number in the index."""
        with self._lock:
            rows = self._read_rows(self._number(key))
            if not 0 <= record < rows.num_rows or not rows["trajectory_index"][record].is_valid:
                raise DataError(f"episode {key!r} has no record {record}")
        row = rows.slice(record, 1).to_pylist()[0]
        texts = self._token_texts()
        return describe_tokens(row, texts) | {"no_pieces_because": self._texts_missing or None}

    def _number(self, key: str | int) -> int:
        return key if isinstance(key, int) else self.index.find(key)

    def _read_rows(self, number: int, columns: Sequence[str] = ()) -> pa.Table:
        """Return the rows of an episode, a row for each record."""
        assert self._groups is not None
        starts = self.index.row_of_group
        row = int(self.index.column("row")[number])
        count = max(1, int(self.index.column("num_records")[number]))
        first = int(np.searchsorted(starts, row, side="right")) - 1
        last = int(np.searchsorted(starts, row + count - 1, side="right")) - 1
        names = tuple(columns) or tuple(TRAINING_SCHEMA.names if self._groups.is_training else SCHEMA.names)
        key = (self._identity, first, last, names)
        if self._last_read is None or self._last_read[0] != key:
            self._last_read = (key, self._groups.read(range(first, last + 1), names))
        return self._last_read[1].slice(row - int(starts[first]), count)

    def _read_whole(self, number: int) -> list[dict[str, Any]]:
        """Return the rows of an episode after the checks of `read_results`; `DataError` if one finds a fault."""
        return check_rows(self._read_rows(number), f"{self._source}: episode {self.index.table['key'][number]}")

    def _token_limits(self) -> TokenLimits:
        with _TOKENIZERS:
            if self._limits is None:
                self._limits = find_limits(self.folder)
            return self._limits

    def _token_texts(self) -> TokenTexts | None:
        with _TOKENIZERS:
            if not self._texts_loaded:
                decode, self._texts_missing = find_decoder(self.folder)
                self._texts = None if decode is None else TokenTexts(decode)
                self._texts_loaded = True
            return self._texts

    def _find_source(self) -> Path | None:
        """Return the file of episodes, or the folder of a training's steps; None if there are no episodes yet."""
        if not self.path.is_dir():
            return self.path
        try:
            return find_rows(self.path, _STEM)
        except DataError:
            if any((self.path / f"{_STEM}{suffix}").exists() for suffix in SUFFIXES):
                raise  # there are two, and one of them would be shown silently
        steps = self.path / _STEPS_FOLDER
        return steps if list_steps(steps) else None

    def _reopen(self, source: Path) -> None:
        self._stop_searches()
        groups = _open_source(source)
        if self._groups is not None:
            self._groups.close()
        self._source, self._groups, self.index = source, groups, EpisodeIndex()

    def _stop_searches(self) -> None:
        for _state, search in self._searches.values():
            search.stop()
        self._searches.clear()


def _names() -> list[str]:
    return [
        METRICS_FILE,
        RUNNING_FILE,
        *(f"{_STEM}{suffix}{ending}" for suffix in SUFFIXES for ending in ("", PARTIAL)),
    ]


def _open_source(source: Path) -> RowGroups:
    return open_steps(source) if source.is_dir() else open_groups(source)
