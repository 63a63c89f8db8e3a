"""Signals that ask a program to end."""

import os
import signal

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
