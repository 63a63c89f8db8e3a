"""Shared by the benchmarks: a description of the machine, CPU time of a process tree, and spreads."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("turnwise", "ray", "numpy", "torch", "transformers")


def describe_machine() -> str:
    """Return one line: processor, cores, load and package versions."""
    versions = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"no {name}")
    load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "load unknown"
    return f"{_processor()}, {os.cpu_count()} cores, {load}; {', '.join(versions)}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and all its descendants so far."""
    import psutil

    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:  # it ended since the list was made
            continue
        total += times.user + times.system
    return total


def run_python(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> int:
    """
    Run a Python program on one thread of torch, with its output in a file.

    Returns:
        Its largest resident memory in MiB.

    Raises:
        RuntimeError: it failed.
    """
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen([sys.executable, *command], stdout=stream, stderr=stream, env=variables)
        _pid, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with exit code {process.returncode}: see {log}")
    return used.ru_maxrss >> 10


def format_spread(values: Sequence[float], digits: int = 3) -> str:
    """Return median, min and max as text: `1.5 (1.2-2.0)`."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"
