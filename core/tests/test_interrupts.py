"""Signals that ask a program to end."""

import os
import signal
import subprocess
import sys

import pytest

from turnwise.cli import main
from turnwise.interrupts import handle_interrupts, raise_interrupt


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_a_command(sent, monkeypatch, capsys):
    """At any moment, also before the command handles signals itself: exit code 130, and the handler is as before."""
    before = signal.getsignal(sent)
    monkeypatch.setattr("turnwise.cli.load", lambda _recipe: os.kill(os.getpid(), sent))
    assert 130 == main(["plugins"])
    assert "turnwise: interrupted\n" == capsys.readouterr().err
    assert before is signal.getsignal(sent)


def test_an_ignored_sighup_stays_ignored():
    """As under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handle_interrupts(raise_interrupt):
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.SIG_IGN is signal.getsignal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_handled_signal_ends_an_alarm():
    """Ray's C++ code handles SIGTERM too, and sets one that would abort the process while it ends."""
    with handle_interrupts(lambda: None):
        signal.alarm(600)
        os.kill(os.getpid(), signal.SIGTERM)
        assert 0 == signal.alarm(0)


ENDING = """
import atexit, os, signal, sys
import turnwise.cli

sys.argv = ["turnwise", *WORDS]
atexit.register(lambda: os.kill(os.getpid(), signal.SENT))
sys.exit(turnwise.cli.main())
"""


@pytest.mark.many_cases(2)
@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize(("words", "code"), [(["plugins"], 0), (["config", "show", "missing.yaml"], 2)])
def test_a_signal_behind_the_end_of_a_command(sent, words, code):
    """The exit code of the command stays, and the signal prints nothing."""
    program = ENDING.replace("SENT", sent).replace("WORDS", repr(words))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert code == done.returncode, done.stderr
    assert "Traceback" not in done.stderr
    assert "interrupted" not in done.stderr


def test_a_second_signal_while_the_first_is_reported():
    """It ends the process at once, without a traceback."""
    report = "import turnwise.cli as cli\nwrite = cli.write_error\n"
    report += "cli.write_error = lambda text: (write(text), os.kill(os.getpid(), signal.SIGINT))\n"
    report += "cli.load = lambda _recipe: os.kill(os.getpid(), signal.SIGINT)\n"
    program = ENDING.replace("import turnwise.cli\n", report).replace("SENT", "SIGINT").replace("*WORDS", "'plugins'")
    program = program.replace("turnwise.cli.main", "cli.main")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert (130, "turnwise: interrupted\n") == (done.returncode, done.stderr)
