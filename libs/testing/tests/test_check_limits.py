"""The time limit of a check on a busy machine."""

import os
import subprocess
import sys
import threading
import time

import pytest

from turnwise_testing.checks.check import run_within

SPIN = "while True: pass"


@pytest.fixture
def crowded_core():
    """Three processes that compute on the only core of this thread, and so of the threads that it starts."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system cannot choose the core of a thread")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(3)]
    yield
    for each in spinning:
        each.kill()
        each.wait()
    os.sched_setaffinity(0, cores)


def compute(seconds):
    """Use a core for a time."""
    started = time.thread_time()
    while time.thread_time() - started < seconds:
        pass
    return "done"


@pytest.mark.slow
def test_seconds_without_a_core_do_not_count(crowded_core):
    """A check that computes for half of its limit passes although it takes four times as long."""
    assert run_within(lambda: compute(0.75), "It computes.", timeout_s=1.5) == "done"


@pytest.mark.slow
def test_a_check_that_waits_ends_at_its_limit_beside_others(crowded_core):
    """Seconds in which it waits for something else than a core count."""
    with pytest.raises(AssertionError, match=r"nothing came within 0\.2 s"):
        run_within(threading.Event().wait, "It waits.", timeout_s=0.2)


@pytest.mark.slow
def test_a_check_that_computes_for_ever_ends_beside_others(crowded_core):
    """Its seconds on the core count."""
    is_over = threading.Event()

    def compute_until_over():
        while not is_over.is_set():
            pass

    with pytest.raises(AssertionError, match=r"nothing came within 0\.2 s"):
        run_within(compute_until_over, "It computes.", timeout_s=0.2)
    is_over.set()
