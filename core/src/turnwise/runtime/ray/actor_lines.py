"""
The log lines of actors, in the driver.

Ray prints a coloured name of the process before each line of an actor, so no program can read a line of JSON. Here,
lines of the log are printed without it, and the name of the process is a key of the object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import groupby
from typing import Any, Final

import structlog
from attrs import frozen

from turnwise.events.json_stream import as_json_line, asks_for_json, dump_line
from turnwise.events.logging import LINE_LOCK
from turnwise.terminal import literal
from turnwise.types import JsonDict

PrintLines = Callable[[Mapping[str, Any]], object]
"""Prints lines that Ray has read from a process: `lines`, `pid`, `ip`, `is_err` and more."""

_HANDLER: Final = "ray_print_logs"
"""Ray's name of the function that prints the lines; Ray removes the function when it disconnects."""


@frozen
class ActorLines:
    """
    Prints the lines of the log whole, and leaves the other lines to Ray.

    When every line of standard error must be an object, the other lines are events there, from both streams.
    """

    print_others: PrintLines

    def __call__(self, data: Mapping[str, Any]) -> None:
        """Print the lines in their order."""
        stream = sys.stderr if data["is_err"] else sys.stdout
        parsed = [(line, _log_entry(line)) for line in data.get("lines", ())]
        pid = str(data["pid"])  # a number, or the name of a part of Ray
        origin: JsonDict = {"actor": data.get("actor_name"), "pid": int(pid) if pid.isdecimal() else pid}
        if data.get("ip") != data.get("localhost"):
            origin["ip"] = data.get("ip")
        # Ray writes a line in parts, and other threads write the log of this process.
        with LINE_LOCK, suppress(OSError):  # the reader of the log may end before the run
            for is_other, group in groupby(parsed, key=lambda each: each[1] is None):
                if is_other and asks_for_json():
                    origin["stream"] = "stderr" if data["is_err"] else "stdout"
                    others = filter(None, (as_json_line(line, **origin) for line, _entry in group))
                    sys.stderr.write("".join(f"{line}\n" for line in others))
                elif is_other:
                    self.print_others({**data, "lines": [literal(line) for line, _entry in group]})
                else:
                    # In ASCII: a control character in a text of others must reach no terminal.
                    stream.write("".join(f"{dump_line({**origin, **(entry or {})})}\n" for _line, entry in group))
            stream.flush()


def print_log_lines_whole() -> None:
    """Print the log lines of actors as one JSON object each, while this process is connected to Ray. Idempotent."""
    try:
        from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

        printing = dict(dispatcher.handlers).get(_HANDLER)
    except (ImportError, AttributeError):  # Ray has no public way to the lines, and may change this one
        structlog.get_logger().warning("log lines of actors have a prefix: this version of Ray adds it")
        return
    # None: the caller has connected without the lines of actors.
    if printing is not None and not isinstance(printing, ActorLines):
        dispatcher.remove_handler(_HANDLER)
        dispatcher.add_handler(_HANDLER, ActorLines(printing))


def _log_entry(line: str) -> JsonDict | None:
    """Return the object of a line that `configure_logging` has made, and None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"event", "level", "timestamp"} <= found.keys() else None
