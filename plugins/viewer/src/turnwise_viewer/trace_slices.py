"""The slices of a trace file: when each episode, turn, tool call and reward ran, by worker and replica."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from turnwise.errors import DataError, describe
from turnwise.types import JsonDict

TRACE_FILE: Final = "trace.json"
CATEGORIES: Final = ("episode", "turn", "tool", "reward", "generate", "memory")

FindKey = Callable[[Mapping[str, Any]], str | None]
"""Returns the key of the episode that the arguments of a slice name; None if the run has no such episode."""


def read_timeline(folder: Path, find_key: FindKey, wanted: Callable[[str | None], bool] | None) -> JsonDict | None:
    """
    Return the timeline that the observer `trace_file` wrote into the run's folder as `trace.json`; None without one.

    `rows` are the slots of workers and replicas, each with a `name` and `slices` of start and duration in seconds,
    category, name and key of the episode. Time 0 is the start of the first slice.

    Args:
        folder: of the run.
        find_key: names the episode of a slice.
        wanted: whether the slices of an episode are in the timeline; None for all. Slices of no episode, such as an
            update of weights, are there if they are between the first and the last slice of the chosen episodes.

    Raises:
        DataError: the file cannot be read, or is no trace of turnwise.
    """
    file = folder / TRACE_FILE
    try:
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        return _lay_out(events, find_key, wanted)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{file}: not a trace of turnwise: {describe(error)}") from error


def _lay_out(events: list[dict[str, Any]], find_key: FindKey, wanted: Callable[[str | None], bool] | None) -> JsonDict:
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    slices = [
        (each, None if each["cat"] == "memory" else find_key(each["args"]))
        for each in events
        if each["ph"] == "X" and each["cat"] in CATEGORIES
    ]
    if wanted is not None:
        slices = _choose(slices, wanted)
    start_us = min((each["ts"] for each, _key in slices), default=0.0)
    rows: dict[tuple[int, int], list[list[Any]]] = {}
    for each, key in slices:
        begin, length = (each["ts"] - start_us) / 1e6, each["dur"] / 1e6
        if not math.isfinite(begin + length):
            raise ValueError("a time is not a number")
        rows.setdefault((each["pid"], each["tid"]), []).append([begin, length, each["cat"], each["name"], key])
    return {
        "seconds": max(((each["ts"] + each["dur"] - start_us) / 1e6 for each, _key in slices), default=0.0),
        "rows": [
            {"name": names.get(pid, f"row {pid}"), "slot": tid, "slices": sorted(row, key=lambda each: each[0])}
            for (pid, tid), row in sorted(rows.items())
        ],
    }


_Slices = list[tuple[dict[str, Any], str | None]]


def _choose(slices: _Slices, wanted: Callable[[str | None], bool]) -> _Slices:
    chosen = [each for each, key in slices if each["cat"] != "memory" and wanted(key)]
    start = min((each["ts"] for each in chosen), default=0.0)
    end = max((each["ts"] + each["dur"] for each in chosen), default=0.0)
    return [
        (each, key)
        for each, key in slices
        if (wanted(key) if each["cat"] != "memory" else start < each["ts"] + each["dur"] and each["ts"] < end)
    ]
