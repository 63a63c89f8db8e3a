"""The log has the warnings of an engine that starts a container, such as a limit that it ignores."""

import asyncio
import uuid

import pytest
from structlog.testing import capture_logs

from turnwise.errors import InfrastructureError
from turnwise_workspaces.engine_command import ask_engine


def ask(script, **options):
    with capture_logs() as logs:
        printed = asyncio.run(ask_engine(["/bin/sh", "-c", script], **options))
    return printed, [entry["warning"] for entry in logs if entry["event"] == "container engine warns"]


def test_a_warning_is_logged_once():
    """Each container of a run has the same warning; another one is another line."""
    one, two = (f"limits are ignored {uuid.uuid4()}" for _ in range(2))
    assert ask(f"echo {one} >&2; echo id", log_warnings=True) == ("id\n", [one])
    assert ask(f"echo {one} >&2; echo id", log_warnings=True) == ("id\n", [])
    assert ask(f"echo {two} >&2; echo id", log_warnings=True) == ("id\n", [two])


def test_without_a_warning_the_log_is_empty():
    """Nothing is logged, and the errors of other commands, such as a removal, are dropped."""
    assert ask("echo id", log_warnings=True) == ("id\n", [])
    assert ask("echo gone >&2; echo id") == ("id\n", [])


def test_an_error_is_no_warning():
    """The caller gets it."""
    with pytest.raises(InfrastructureError, match="no such image"):
        ask("echo no such image >&2; exit 125", log_warnings=True)
