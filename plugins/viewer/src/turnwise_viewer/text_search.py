"""
Search for a text in the messages and sampled tokens of all episodes.

The texts of a large run have gigabytes. A search reads first the groups of rows that have the episodes at the head of
the list, in the order in which the page sorts it, so that the page has its first hits early. Then it counts the others.
It works only while a request waits for it: the next request continues, and nothing runs after the client has left.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from attrs import frozen
from numpy.typing import NDArray

from turnwise_viewer.episode_index import EpisodeIndex
from turnwise_viewer.row_groups import RowGroups

TEXT_COLUMNS: Final = ("messages", "response_text", "prompt_text")
_ROWS_AT_ONCE: Final = 256
_NUM_THREADS: Final = min(4, os.cpu_count() or 1)


@frozen(eq=False)
class Found:
    """
    Hits of a search so far.

    Attributes:
        numbers: of the episodes with the text, in the order of the list.
        num_open: episodes that may have the text and were not read yet.
        searched: share of the episodes that are decided, 1 at the end.
        is_settled: whether no later hit changes the head of the list.
    """

    numbers: NDArray[np.int64]
    num_open: int = 0
    searched: float = 1.0
    is_settled: bool = True


@frozen(eq=False)
class SearchedFile:
    """
    A file of episodes.

    Attributes:
        open_groups: opens the file; each thread opens its own, because readers are not safe between threads.
        index: of the file.
    """

    open_groups: Callable[[], RowGroups]
    index: EpisodeIndex


class TextSearch:
    """
    A search in the rows that a file has now.

    Args:
        file: with the texts.
        text: compared without regard to case.
        candidates: (n,) numbers of the episodes to look at.
        before: a stopped search for the same, when the file had fewer rows.
    """

    def __init__(
        self, file: SearchedFile, text: str, candidates: NDArray[np.int64], before: TextSearch | None = None
    ) -> None:
        index = file.index
        self._open_groups = file.open_groups
        self._texts = {name: _forms_in_json(text) if name == "messages" else {text} for name in TEXT_COLUMNS}
        self._rows = index.column("row").astype(np.int64)
        self._starts = index.row_of_group
        self._hits = np.zeros(len(index), bool)
        is_candidate = np.zeros(len(index), bool)
        is_candidate[candidates] = True
        self._num_candidates = len(candidates)
        self._open_rows = is_candidate[self._episodes_of(np.arange(self._starts[-1]))]
        """(rows,) whether the row may have the text, and was not read yet."""
        if before is not None:
            self._continue(before)
        self._queue: list[int] = []
        self._taken: set[int] = set()
        self._order: NDArray[np.int64] = np.zeros(0, np.int64)
        self._num_waiting = 0
        self._is_stopped = False
        self._progress = threading.Condition()
        self._error: Exception | None = None
        self._returned: set[int] = set()
        """Hashes of the settled heads that were returned."""
        self._num_running = 0
        self._files: list[RowGroups] = []
        """Opened files that no thread reads now."""

    def find(self, order: NDArray[np.int64], num_hits: int, timeout_s: float) -> Found:
        """
        Return the hits so far, at once when the head of the list is settled, else after a time.

        A call for a head that has been returned already waits for the count of all hits, or as long.

        Args:
            order: (n,) the candidates in the order of the list.
            num_hits: length of the head.
            timeout_s: longest wait.
        """
        head = hash((order.tobytes(), num_hits))

        def is_done() -> bool:
            found = self._look(order, num_hits)
            return found.num_open == 0 if head in self._returned else found.is_settled

        with self._progress:
            self._set_order(order)
            self._num_waiting += 1
            for _ in range(self._num_running, _NUM_THREADS if self._queue else 0):
                self._num_running += 1
                threading.Thread(target=self._run, name="turnwise-search", daemon=True).start()
        try:
            with self._progress:
                self._progress.wait_for(lambda: self._error or is_done(), timeout_s)
                if self._error is not None:
                    raise self._error
                found = self._look(order, num_hits)
                self._returned |= {head} if found.is_settled else set()
                return found
        finally:
            with self._progress:
                self._num_waiting -= 1

    def stop(self) -> None:
        """End the search early, wait for the end of its threads, and close the files."""
        with self._progress:
            self._is_stopped = True
            self._progress.wait_for(lambda: self._num_running == 0)
            for groups in self._files:
                groups.close()
            self._files.clear()

    def _continue(self, before: TextSearch) -> None:
        """Take over the decisions about the rows that were there before."""
        self._open_rows[: len(before._open_rows)] &= before._open_rows
        self._hits[: len(before._hits)] = before._hits
        # A further record of the last hit may have come.
        self._open_rows &= ~self._hits[self._episodes_of(np.arange(len(self._open_rows)))]

    def _set_order(self, order: NDArray[np.int64]) -> None:
        """Read the groups with the first episodes of the list first."""
        if np.array_equal(order, self._order):
            return
        self._order = order
        rank = np.full(len(self._hits), len(self._hits), np.int64)
        rank[order] = np.arange(len(order))
        rows = np.flatnonzero(self._open_rows)
        group_rank = np.full(len(self._starts) - 1, len(self._hits), np.int64)
        groups = np.searchsorted(self._starts, rows, side="right") - 1
        np.minimum.at(group_rank, groups, rank[self._episodes_of(rows)])
        # From the last to the first: a thread takes the end of the list.
        wanted = np.setdiff1d(groups, np.array([*self._taken], np.int64))
        self._queue = wanted[np.argsort(group_rank[wanted], kind="stable")][::-1].tolist()

    def _look(self, order: NDArray[np.int64], num_hits: int) -> Found:
        is_open = self._open_episodes()[order]
        is_hit = self._hits[order]
        num_open = int(is_open.sum())
        num_decided = int(is_open.argmax()) if num_open else len(order)
        return Found(
            order[is_hit],
            num_open,
            1 - num_open / max(1, self._num_candidates),
            num_open == 0 or int(is_hit[:num_decided].sum()) >= num_hits,
        )

    def _open_episodes(self) -> NDArray[np.bool_]:
        """Return (episodes,) whether a row of the episode is open."""
        found: NDArray[np.bool_] = np.logical_or.reduceat(self._open_rows, self._rows)
        return found

    def _run(self) -> None:
        groups: RowGroups | None = None
        while batch := self._next_batch(groups):
            try:
                groups = groups or self._take_file()
                rows, has_text = self._search(groups, batch)
            except Exception as error:  # noqa: BLE001 - the thread of the request raises it
                with self._progress:
                    self._error = error
            else:
                with self._progress:
                    self._note(batch, rows, has_text)
        pa.default_memory_pool().release_unused()

    def _next_batch(self, groups: RowGroups | None) -> list[int]:
        """
        Take the next groups of the queue that have open rows; none if no request waits.

        A thread that gets none ends, and leaves its file to the next one. Its end is noted under the same lock: a
        request that comes at this moment sees that it has to start another thread.
        """
        batch: list[int] = []
        num_rows = 0
        with self._progress:
            while self._queue and num_rows < _ROWS_AT_ONCE and self._is_wanted():
                group = self._queue.pop()
                rows = slice(self._starts[group], self._starts[group + 1])
                if self._open_rows[rows].any():
                    batch.append(group)
                    num_rows += rows.stop - rows.start
            self._taken.update(batch)
            if not batch:
                self._num_running -= 1
                self._files += [groups] if groups is not None else []
                self._progress.notify_all()
        return sorted(batch)

    def _take_file(self) -> RowGroups:
        with self._progress:
            if self._files:
                return self._files.pop()
        return self._open_groups()

    def _is_wanted(self) -> bool:
        return self._num_waiting > 0 and self._error is None and not self._is_stopped

    def _search(self, groups: RowGroups, batch: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the rows of these groups, and which of the open ones have the text."""
        rows = np.concatenate([np.arange(self._starts[group], self._starts[group + 1]) for group in batch])
        sizes = [int(self._starts[group + 1] - self._starts[group]) for group in batch]
        group_of_row = np.repeat(batch, sizes)
        open_rows = self._open_rows[rows]
        seen = np.zeros(len(rows), bool)
        for name, forms in self._texts.items():
            # Most texts are in the messages as well: a group in which each episode is a hit needs no other column.
            left = sorted({*group_of_row[open_rows & ~seen].tolist()})
            if not left:
                break
            there = np.isin(group_of_row, left)
            column = groups.read(left, (name,))[name]
            for form in forms:
                matches = pc.fill_null(pc.match_substring(column, form, ignore_case=True), False)
                seen[there] |= matches.to_numpy().astype(bool)
        return rows, open_rows & seen

    def _note(self, batch: Sequence[int], rows: NDArray[np.int64], has_text: NDArray[np.bool_]) -> None:
        self._taken.difference_update(batch)
        self._open_rows[rows] = False
        found = np.unique(self._episodes_of(rows[has_text]))
        self._hits[found] = True
        # The other records of a hit need not be read.
        stops = np.append(self._rows[1:], self._starts[-1])[found]
        for start, stop in zip(self._rows[found].tolist(), stops.tolist(), strict=True):
            self._open_rows[start:stop] = False
        self._progress.notify_all()

    def _episodes_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        episodes: NDArray[np.int64] = np.searchsorted(self._rows, rows, side="right") - 1
        return episodes


def _forms_in_json(text: str) -> set[str]:
    """Return a text as it is written inside of JSON; a value with half a surrogate pair is written in ASCII."""
    return {json.dumps(text, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True)}


def check_searchable(text: str) -> str:
    """Return the text as UTF-8 has it: half a surrogate pair, which no file has, becomes a replacement mark."""
    return text.encode("utf-8", "replace").decode()
