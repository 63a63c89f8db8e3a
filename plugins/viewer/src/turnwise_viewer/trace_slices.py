"""The slices of a trace file: when each episode, turn, tool call and reward ran, by worker and replica."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from turnwise.errors import DataError
from turnwise.types import JsonDict

TRACE_FILE: Final = "trace.json"
_CATEGORIES: Final = ("episode", "turn", "tool", "reward", "generate", "memory")


def read_timeline(folder: Path) -> JsonDict | None:
    """
    Return the timeline that `turnwise rollout --trace DIR/trace.json` wrote into the run's folder; None without one.

    `rows` are the slots of workers and replicas, each with a `name` and `slices` of start and duration in seconds,
    category, name and uid of the episode. Time 0 is the start of the first slice.

    Raises:
        DataError: the file cannot be read, or is no trace of turnwise.
    """
    file = folder / TRACE_FILE
    try:
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        return _lay_out(events)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: not a trace of turnwise: {error!r}") from error


def _lay_out(events: list[dict[str, Any]]) -> JsonDict:
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    slices = [each for each in events if each["ph"] == "X" and each["cat"] in _CATEGORIES]
    start_us = min((each["ts"] for each in slices), default=0.0)
    rows: dict[tuple[int, int], list[list[Any]]] = {}
    for each in slices:
        uid = each["args"].get("uid")
        begin, length = (each["ts"] - start_us) / 1e6, each["dur"] / 1e6
        rows.setdefault((each["pid"], each["tid"]), []).append([begin, length, each["cat"], each["name"], uid])
    return {
        "seconds": max(((each["ts"] + each["dur"] - start_us) / 1e6 for each in slices), default=0.0),
        "rows": [
            {"name": names.get(pid, f"row {pid}"), "slot": tid, "slices": sorted(row, key=lambda each: each[0])}
            for (pid, tid), row in sorted(rows.items())
        ],
    }
