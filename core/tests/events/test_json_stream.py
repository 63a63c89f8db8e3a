"""Standard error as a stream of JSON objects, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from turnwise.events.json_stream import as_json_line

START = """
import os, subprocess, sys, threading, warnings
import structlog
from turnwise import configure_logging
configure_logging("info", "json", whole_stream=True)
"""
WRITERS = {
    "log": 'structlog.get_logger().info("ours", number=1)',
    "print": 'print("from a library", file=sys.stderr)',
    "warning": 'warnings.warn("old")',
    "descriptor": 'os.write(2, b"C++ says \\xff\\n")',
    "child": 'subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write(\'a child\')"])',
    "thread": "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()",
    "not a number": 'structlog.get_logger().info("ours", number=float("nan"))',
    "a crash": 'sys.stderr.write("last words"); sys.stderr.flush(); os._exit(3)',
    "an exception": "1 / 0",
    "two lines": 'structlog.get_logger().info("a\\nb"); sys.stderr.write("\\n\\n")',
}


def lines_of(code: str, *options: str) -> list[str]:
    """Run code in a separate process; return the lines of its standard error."""
    command = [sys.executable, *options, "-c", START + code]
    done = subprocess.run(command, stderr=subprocess.PIPE, timeout=600, check=False)
    return done.stderr.decode().splitlines()


@pytest.mark.many_cases(2)
@pytest.mark.parametrize("writer", WRITERS)
def test_every_line_is_an_object(writer: str) -> None:
    """Whoever writes it, and also when the process crashes; nothing is lost."""
    lines = lines_of(WRITERS[writer])
    entries = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert entries
    assert all({"event", "level", "timestamp"} <= entry.keys() for entry in entries)


def test_a_signal_for_the_whole_group_loses_no_line() -> None:
    """Ctrl-C on a terminal reaches every process of the command, and the last lines come after it."""
    code = 'import signal, time\ntry:\n print("ready", flush=True); time.sleep(600)\nexcept KeyboardInterrupt:\n '
    code += 'sys.stderr.write("interrupted\\n")'
    command = [sys.executable, "-c", START + code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    _out, err = process.communicate(timeout=600)
    assert ["interrupted"] == [json.loads(line)["event"] for line in err.splitlines()]


@given(st.text(alphabet=st.characters(exclude_characters="\n\r", exclude_categories=["Cs"])))
def test_any_text_becomes_an_object_that_has_it(text: str) -> None:
    """Objects stay as they are, and lines without text disappear."""
    line = as_json_line(text, pid=1)
    if text.strip():
        assert (text, 1) == (json.loads(line)["event"], json.loads(line)["pid"])
        assert line == as_json_line(line)
    else:
        assert "" == line


@example("\x7f\x9b\u202e", {"a": "\x7f\x9b\U000e0001"})
@given(st.text(), st.dictionaries(st.text(max_size=3), st.text(), max_size=3))
def test_texts_of_others_neither_move_the_cursor_nor_break_the_object(text, entry):
    """A line of a library, and an object with any text in it: the shown line is printable ASCII, with equal values."""
    line = text.replace("\n", " ").replace("\r", " ")
    shown = as_json_line(line)
    assert shown.isascii()
    assert shown.isprintable()
    if line.strip() and not line.startswith("{"):
        assert line == json.loads(shown)["event"]

    shown = as_json_line(json.dumps(entry, ensure_ascii=False))
    assert shown.isascii()
    assert entry == json.loads(shown)


@given(st.sampled_from(["and another", "{", '{"', '[{"a": 1}] ', "x" * 50 + ' {"event": 1} ']), st.booleans())
def test_a_log_line_behind_the_text_of_a_library_is_an_object(text, has_own_key):
    """Another thread logs while a library has not ended its line: both are there, and the log line has its keys."""
    entry = {"event": "ours", "level": "info", "timestamp": "2026-01-01T00:00:00Z"} | (
        {"key": "k"} if has_own_key else {}
    )

    first, second = as_json_line(text + json.dumps(entry)).splitlines()

    assert text == json.loads(first)["event"]
    assert entry == json.loads(second)
