"""Logs and observers."""

import io
import json
import subprocess
import sys

import pytest
import structlog
from structlog.testing import capture_logs

from turnwise.errors import PluginError
from turnwise.events.dispatch import EVENTS, Observers
from turnwise.events.logging import configure_logging
from turnwise.events.observer import EpisodeStarted, Observer


def test_json_lines_elsewhere_than_on_a_terminal():
    """
    A stream that is no terminal gets one JSON object per line, tracebacks included.
    """
    stream = io.StringIO()
    configure_logging(stream=stream)
    structlog.get_logger().info("hello", number=3)
    try:
        int("x")
    except ValueError:
        structlog.get_logger().exception("oh")
    first, second = map(json.loads, stream.getvalue().splitlines())

    assert (first["event"], first["number"], first["level"]) == ("hello", 3, "info")
    assert "ValueError: invalid literal" in second["exception"]


def test_console_on_a_terminal():
    """
    A terminal gets lines for people.
    """

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    configure_logging(stream=stream)
    structlog.get_logger().info("hello", number=3)

    assert "hello" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_level():
    """
    Lines below the level are dropped.
    """
    stream = io.StringIO()
    configure_logging("warning", "json", stream)
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")

    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["loud"]


def test_standard_error_is_looked_up_late(capsys):
    """
    A replaced standard error gets the lines that follow.
    """
    configure_logging(log_format="json")
    structlog.get_logger().info("hello")

    assert json.loads(capsys.readouterr().err)["event"] == "hello"


@pytest.mark.parametrize(
    "before", ["import structlog", "with contextlib.redirect_stdout(sys.stderr): import structlog"]
)
def test_lines_never_go_to_standard_output(before):
    """Also if standard output was replaced while structlog was imported, as it is while plugins are."""
    code = (
        f"import contextlib, sys\n{before}\nfrom turnwise.events.logging import configure_logging\n"
        "configure_logging()\nstructlog.get_logger().info('hello')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert (done.stdout, json.loads(done.stderr)["event"]) == ("", "hello")


def test_a_stream_that_takes_no_more_costs_only_its_lines():
    """The reader of a pipe may end before the run."""

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    configure_logging(stream=Closed())
    structlog.get_logger().info("hello")


class Ear(Observer):
    """Hears one event."""

    def __init__(self, fails=False):
        self.heard = []
        self.fails = fails

    def on_episode_started(self, event):
        self.heard.append(event)
        if self.fails:
            raise RuntimeError("deaf")


def test_only_overridden_events_are_heard():
    """
    An event without an override has no listener; an overridden one has exactly one.
    """
    observers = Observers.of([Observer(), Ear()])

    assert [name for name in EVENTS if observers.heard(name)] == ["on_episode_started"]


def test_an_observer_that_raises_is_switched_off_and_logged_once():
    """
    The other observers still receive events, and the run continues.
    """
    broken, good = Ear(fails=True), Ear()
    observers = Observers.of([broken, good])
    event = EpisodeStarted(uid="a/0", task=None, agent_name="x")
    with capture_logs() as logs:
        for _ in range(3):
            observers.emit("on_episode_started", event)

    assert (len(broken.heard), len(good.heard)) == (1, 3)
    assert [(log["event"], log["observer"]) for log in logs] == [("observer switched off", f"Ear of {__name__}")]


def _misspelt():
    class Misspelt(Observer):
        def on_turn_finish(self, event): ...


def _async():
    class Awaited(Observer):
        async def on_turn_finished(self, event): ...


@pytest.mark.parametrize(("define", "name"), [(_misspelt, "Misspelt.on_turn_finish"), (_async, "Awaited.on_turn_fin")])
def test_a_method_that_would_never_be_called_is_refused(define, name):
    """A class with a misspelt or an async method cannot be made, so its plugin is broken and says why."""
    with pytest.raises(TypeError, match=f"{name}.* would never be called"):
        define()


class Resource(Observer):
    """Has something to open and to close."""

    def __init__(self, fails=False):
        self.states = []
        self.fails = fails

    def open(self):
        self.states.append("open")

    def close(self):
        self.states.append("closed")
        if self.fails:
            raise RuntimeError("stuck")


def test_observers_are_opened_and_closed():
    """
    One that fails to close is logged and keeps no other from it.
    """
    first, second = Resource(fails=True), Resource()
    observers = Observers.of([first, second])
    observers.open()
    with capture_logs() as logs:
        observers.close()

    assert first.states == second.states == ["open", "closed"]
    assert [log["event"] for log in logs] == ["observer did not close"]


def test_an_observer_that_does_not_open_is_named():
    """One line with the class and the cause, which stops the run."""

    class Locked(Observer):
        def open(self):
            raise OSError("no port is free")

    with pytest.raises(PluginError, match=f"observer .*Locked of {__name__} does not open: OSError: no port is free"):
        Observers.of([Locked()]).open()
