"""Lines of actors in the driver: a line of the log is one JSON object, and Ray prints the others."""

import contextlib
import io
import json

from hypothesis import example, given
from hypothesis import strategies as st

from turnwise.events import json_stream
from turnwise.runtime.ray.actor_lines import ActorLines

LINE = '{"event": "tool called", "level": "info", "timestamp": "2026-01-01T00:00:00Z", "key": "k"}'
OTHERS = st.sampled_from(["plain", "{", "{}", '{"event": 1}', "[1]", '"x"', "{not json}", f" {LINE}", f"x {LINE}", ""])


def data_of(*lines, **changes):
    return {
        "lines": list(lines),
        "pid": "7",
        "actor_name": "WorkerActor",
        "ip": "a",
        "localhost": "a",
        "is_err": True,
    } | changes


@contextlib.contextmanager
def json_is_asked():
    json_stream._asked.set()
    try:
        yield
    finally:
        json_stream._asked.clear()


def test_a_log_line_is_one_object(capsys):
    """It has the actor and the process, and on another machine the address; keys of the line itself win."""
    show = ActorLines(lambda _data: None)
    show(data_of(LINE))
    show(data_of(LINE.replace('"k"', '"é"'), ip="b", is_err=False))
    show(data_of(LINE[:-1] + ', "pid": 3}'))

    out, err = capsys.readouterr()
    first, own_pid = map(json.loads, err.splitlines())
    assert {"actor": "WorkerActor", "pid": 7, **json.loads(LINE)} == first
    assert 3 == own_pid["pid"]
    assert ("b", "é") == (json.loads(out)["ip"], json.loads(out)["key"])


@given(st.lists(st.one_of(st.just(LINE), OTHERS), max_size=12))
def test_no_line_is_lost_or_moved(lines):
    """Ray prints all lines that are not of the log, and the order stays."""
    stream = io.StringIO()
    show = ActorLines(lambda data: stream.write("".join(f"other: {line}\n" for line in data["lines"])))
    with contextlib.redirect_stderr(stream):
        show(data_of(*lines))

    shown = stream.getvalue().split("\n")[:-1]
    assert [line == LINE for line in lines] == [not each.startswith("other: ") for each in shown]
    assert [line for line in lines if line != LINE] == [each[7:] for each in shown if each.startswith("other: ")]


@given(st.lists(st.one_of(st.just(LINE), OTHERS), max_size=12), st.booleans())
def test_in_json_every_line_names_its_actor(lines, is_err):
    """A line of the log names its actor too where it follows text that a library has not ended."""
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream), contextlib.redirect_stdout(stream), json_is_asked():
        ActorLines(lambda _data: None)(data_of(*lines, is_err=is_err))

    shown = [json.loads(line) for line in stream.getvalue().splitlines()]
    named = [each for each in shown if {"event", "timestamp"} <= each.keys()]
    assert all({"actor": "WorkerActor", "pid": 7} == {key: each.get(key) for key in ("actor", "pid")} for each in named)
    assert sum(LINE in line for line in lines) == sum(each.get("key") == "k" for each in named)


@example("\x7f\x9b\U000e0001")
@given(st.text())
def test_a_text_in_a_log_line_reaches_the_terminal_as_escapes(text):
    """The line stays one JSON object with this text, and has no control character."""
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream):
        ActorLines(lambda _data: None)(data_of(json.dumps(json.loads(LINE) | {"key": text}, ensure_ascii=False)))

    (shown,) = stream.getvalue().splitlines()
    assert shown.isascii()
    assert shown.isprintable()
    assert text == json.loads(shown)["key"]
