"""The status of a run, from the report of its server."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_python_sandbox import Status
from turnwise_python_sandbox.box.messages import Exited
from turnwise_python_sandbox.box.program import OUT_OF_MEMORY_SIGNAL
from turnwise_python_sandbox.limits import Limits
from turnwise_python_sandbox.verdict import determine_status

LIMITS = Limits(timeout_s=1.0, memory_mb=100, max_output_bytes=10, cpu_s=3, disk_mb=1, max_files=1)
HALF_THE_MEMORY_KB = 50 * 1024
REPORTS = st.builds(
    Exited,
    st.just(1),
    st.integers(0, 126) | st.integers(0, 255).map(lambda code: code << 8),
    st.sampled_from(["", "wall", "disk", "asked"]),
    st.booleans(),
    st.floats(0, 9),
    st.floats(0, 9),
    st.integers(0, 10**6),
    st.just(""),
)


def report(wait_status: int, **changes: object) -> Exited:
    """Return a report with the given changes."""
    return Exited(1, wait_status, "", False, 0.1, 0.1, 1000, "")._replace(**changes)


def decide(exited: Exited, *, started: bool = True, output_truncated: bool = False) -> Status:
    """Return the status of a report."""
    return determine_status(exited, started=started, output_truncated=output_truncated, limits=LIMITS)


@pytest.mark.parametrize(
    ("exited", "status"),
    [
        (report(0), Status.OK),
        (report(1 << 8), Status.ERROR),
        (report(255 << 8), Status.ERROR),
        (report(1 << 8, disk_full=True), Status.DISK_LIMIT),
        (report(0, disk_full=True), Status.OK),
        (report(signal.SIGKILL, cause="wall"), Status.TIMEOUT),
        (report(signal.SIGKILL, cause="disk"), Status.DISK_LIMIT),
        (report(signal.SIGKILL, cause="asked"), Status.CRASHED),
        (report(signal.SIGXCPU), Status.TIMEOUT),
        (report(signal.SIGXFSZ), Status.DISK_LIMIT),
        (report(OUT_OF_MEMORY_SIGNAL), Status.MEMORY),
        (report(signal.SIGSEGV), Status.CRASHED),
        (report(signal.SIGABRT), Status.CRASHED),
        (report(signal.SIGSEGV | 0x80), Status.CRASHED),
    ],
)
def test_each_kind_of_end_has_its_status(exited: Exited, status: Status) -> None:
    """Exit codes, signals and the server's causes map to the documented statuses."""
    assert status is decide(exited)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, Status.CRASHED),
        ({"cpu_s": 2.99}, Status.CRASHED),
        ({"cpu_s": 3.0}, Status.TIMEOUT),
        ({"max_rss_kb": HALF_THE_MEMORY_KB - 1}, Status.CRASHED),
        ({"max_rss_kb": HALF_THE_MEMORY_KB}, Status.MEMORY),
    ],
)
def test_sigkill_without_a_cause_is_explained_by_the_usage(changes: dict, status: Status) -> None:
    """It is `timeout` at the processor limit, `memory` from half the memory limit on, and otherwise a crash."""
    assert status is decide(report(signal.SIGKILL, **changes))


@given(REPORTS, st.booleans())
def test_a_program_that_did_not_start_is_never_judged(exited: Exited, truncated: bool) -> None:
    """Without `Started`, and without a process, every report is `infra_error`."""
    assert decide(exited, started=False, output_truncated=truncated) is Status.INFRA_ERROR
    assert decide(exited._replace(wait_status=-1), output_truncated=truncated) is Status.INFRA_ERROR


@given(REPORTS)
def test_a_program_that_started_is_never_an_infrastructure_error(exited: Exited) -> None:
    """However a program ends, it cannot cause `infra_error`."""
    assert decide(exited) is not Status.INFRA_ERROR


@given(REPORTS)
def test_too_much_output_comes_first(exited: Exited) -> None:
    """Truncated output is `output_limit`, whatever ended the program afterwards."""
    assert decide(exited, output_truncated=True) is Status.OUTPUT_LIMIT


@given(REPORTS)
def test_only_exit_code_0_is_ok(exited: Exited) -> None:
    """`ok` means that the program exited with 0 and the server did not kill it."""
    is_ok = os.WIFEXITED(exited.wait_status) and os.WEXITSTATUS(exited.wait_status) == 0
    expected = is_ok and exited.cause not in ("wall", "disk")

    assert expected is (decide(exited) is Status.OK)
