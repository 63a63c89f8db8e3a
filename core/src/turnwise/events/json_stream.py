"""
Makes every line of this process's standard error a JSON object, whoever writes it.

Libraries, warnings, tracebacks and code in C++ write to the descriptor and not to the log. So the descriptor becomes a
pipe to another process, which outlives a crash of this one and has its last lines. That process runs this file alone,
without the packages of the environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from datetime import UTC, datetime

_STREAM = 2
_END_S = 2.0
_MAX_STARTS = 16
_KEYS = {"event", "level", "timestamp"}
_open: list[tuple[int, subprocess.Popen[bytes]]] = []
_asked = threading.Event()


def asks_for_json() -> bool:
    """Return whether each line of standard error must be a JSON object now."""
    return _asked.is_set()


def as_json_line(line: str, **origin: object) -> str:
    """
    Return a line that is a JSON object with the same values, and any other as the event of one; "" for an empty line.

    A line that a library has not ended, and a line of the log behind it, are two objects on two lines. Both have the
    origin.

    All characters are ASCII: a control character in a text of others must reach neither a terminal nor break the JSON.
    """
    if line.startswith("{"):
        try:
            entry = json.loads(line, parse_constant=_refuse)
        except ValueError:
            pass
        else:
            return line if line.isascii() and line.isprintable() else dump_line(entry)
    if not line.strip():
        return ""
    text, entry = _split(line)
    if entry:
        behind = dump_line({**origin, **json.loads(entry)})
        return "\n".join(filter(None, (as_json_line(text, **origin), behind)))
    level = "error" if line.startswith("turnwise: error") else "info"
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return dump_line({"event": line, "level": level, "timestamp": now, **origin})


def dump_line(entry: dict[str, object]) -> str:
    """Return an object as JSON in printable ASCII."""
    return json.dumps(entry).replace("\x7f", "\\u007f")


def _split(line: str) -> tuple[str, str]:
    """Return the text before a line of the log, and this line; "" if there is none."""
    start = 0
    for _ in range(_MAX_STARTS):
        start = line.find('{"', start)
        if start < 0:
            break
        try:
            entry = json.loads(line[start:], parse_constant=_refuse)
        except ValueError:
            start += 1
            continue
        if start and _KEYS <= entry.keys():
            return line[:start], line[start:]
        break
    return line, ""


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def open_json_stream() -> None:
    """Start; leave the descriptor if it is open already, or if a program has replaced standard error."""
    _asked.set()
    try:
        if _open or sys.stderr.fileno() != _STREAM:
            return
    except (OSError, ValueError, AttributeError):  # a stream without a descriptor
        return
    original = os.dup(_STREAM)
    reader, writer = os.pipe()
    command = [sys.executable, "-I", "-S", __file__]
    # In a separate session: Ctrl-C on a terminal would end it before it has the last lines.
    process = subprocess.Popen(command, stdin=reader, stdout=subprocess.DEVNULL, start_new_session=True)
    sys.stderr.flush()
    os.dup2(writer, _STREAM)
    os.close(reader)
    os.close(writer)
    _open.append((original, process))


def close_json_stream() -> None:
    """Wait until all lines so far are written, or for two seconds while a child process keeps the stream open."""
    _asked.clear()
    if _open:
        original, process = _open.pop()
        sys.stderr.flush()
        os.dup2(original, _STREAM)
        os.close(original)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.returncode = 0  # it ends with the child


def _copy() -> None:
    """Copy standard input to standard error, each line as an object."""
    for line in sys.stdin.buffer:
        shown = as_json_line(line.decode(errors="backslashreplace").rstrip("\r\n"))
        if shown:
            os.write(_STREAM, f"{shown}\n".encode(errors="backslashreplace"))


if __name__ == "__main__":
    try:
        _copy()
    except OSError:  # the reader of the log has gone
        sys.exit(1)
