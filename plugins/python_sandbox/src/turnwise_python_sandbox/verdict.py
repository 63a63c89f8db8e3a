"""Decides how a run ended, from the report of its server."""

from __future__ import annotations

import os
import signal
from typing import Final

from turnwise_python_sandbox.box.messages import Exited
from turnwise_python_sandbox.box.program import OUT_OF_MEMORY_SIGNAL
from turnwise_python_sandbox.limits import Limits
from turnwise_python_sandbox.result import Status

_KIB_PER_MIB: Final = 1024
_STATUS_BY_CAUSE: Final = {"wall": Status.TIMEOUT, "disk": Status.DISK_LIMIT}


def determine_status(exited: Exited, *, started: bool, output_truncated: bool, limits: Limits) -> Status:
    """
    Return how a run ended.

    Args:
        exited: the server's report, with the memory that the program used itself.
        started: the program was confined and its code started.
        output_truncated: it printed more than its limit.
        limits: the limits of the run.
    """
    if not started or exited.wait_status < 0:
        return Status.INFRA_ERROR
    if output_truncated:
        return Status.OUTPUT_LIMIT
    if exited.cause in _STATUS_BY_CAUSE:
        return _STATUS_BY_CAUSE[exited.cause]
    if os.WIFSIGNALED(exited.wait_status):
        return _determine_from_signal(os.WTERMSIG(exited.wait_status), exited, limits)
    if exited.wait_status == 0:
        return Status.OK
    return Status.DISK_LIMIT if exited.disk_full else Status.ERROR


def _determine_from_signal(number: int, exited: Exited, limits: Limits) -> Status:
    if number == OUT_OF_MEMORY_SIGNAL:
        return Status.MEMORY
    if number == signal.SIGXCPU or (number == signal.SIGKILL and exited.cpu_s >= limits.cpu_s):
        return Status.TIMEOUT
    if number == signal.SIGXFSZ:
        return Status.DISK_LIMIT
    # Without a cause, only the kernel or the program itself sends SIGKILL. The kernel does so for memory.
    used_much_memory = exited.max_rss_kb >= limits.memory_mb * _KIB_PER_MIB // 2
    return Status.MEMORY if number == signal.SIGKILL and used_much_memory else Status.CRASHED
