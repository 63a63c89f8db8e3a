"""Diagnosis of the machine: GPUs, CPU cores, memory and shared memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from turnwise.config.run import RolloutConfig
from turnwise.descriptors import count_fitting, count_needed, raise_descriptor_limit
from turnwise.protocols import Finding
from turnwise_doctor.core_diagnostics import installed_version

_TIMEOUT_S: Final = 120.0
_GIB: Final = 1 << 30
_ENOUGH_MEMORY: Final = 2 * _GIB
_ENOUGH_SHARED_MEMORY: Final = 1 * _GIB
_CGROUP: Final = Path("/sys/fs/cgroup")
_SHARED_MEMORY: Final = Path("/dev/shm")
_NVIDIA_QUERY: Final = ("--query-gpu=name,memory.total", "--format=csv,noheader")
# In a separate process: importing torch takes seconds and can crash, and initializing CUDA claims memory of the GPU.
_TORCH_QUERY: Final = """
import json, torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "names": names}))
"""


class MachineDiagnostic:
    """Checks the resources that engines and workers share."""

    def diagnose(self) -> Iterator[Finding]:
        gpu = gpu_finding()
        yield gpu
        if installed_version("torch"):
            yield torch_finding(has_gpu=gpu.state == "ok")
        yield Finding("CPU", "ok", f"{count_cores():g} cores")
        yield memory_finding()
        yield shared_memory_finding()
        yield open_files_finding()


def gpu_finding() -> Finding:
    """Return the GPUs that NVIDIA's driver reports."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Finding("GPU", "limited", "nvidia-smi is not installed, so no NVIDIA GPU is visible")
    try:
        done = subprocess.run(
            [program, *_NVIDIA_QUERY], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("GPU", "broken", f"nvidia-smi failed: {error}", "check the NVIDIA driver")
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        reason = (lines or done.stderr.strip().splitlines() or ["no output"])[-1]
        return Finding("GPU", "broken", f"nvidia-smi reports no GPU: {reason}", "check the NVIDIA driver")
    gpus = Counter(line.strip() for line in lines)
    return Finding("GPU", "ok", "; ".join(f"{count} x {gpu}" for gpu, count in gpus.items()))


def torch_finding(*, has_gpu: bool) -> Finding:
    """Return the GPUs that the installed torch can use."""
    command = [sys.executable, "-c", _TORCH_QUERY]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Finding("GPU in torch", "broken", f"import torch took more than {_TIMEOUT_S:g} s", "reinstall torch")
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Finding("GPU in torch", "broken", f"import torch failed: {reason}", "reinstall torch")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if found["names"]:
        return Finding("GPU in torch", "ok", f"{found['version']} can use {len(found['names'])} GPUs")
    if has_gpu:
        hint = "install a build of torch for the CUDA version of the driver"
        return Finding("GPU in torch", "limited", f"{found['version']} cannot use the GPU", hint)
    return Finding("GPU in torch", "ok", f"{found['version']} runs on the CPU")


def count_cores() -> float:
    """Return the CPU cores that this process may use, with the quota of its container."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    return min(cores, int(quota) / int(period)) if quota.isdecimal() and period.isdecimal() else cores


def memory_finding() -> Finding:
    """Return total and available memory, with the limit of the container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = _meminfo("MemAvailable") or total
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit.isdecimal() and used.isdecimal() and int(limit) < total:
        total, available = int(limit), min(available, max(0, int(limit) - int(used)))
    text = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB are available"
    if available < _ENOUGH_MEMORY:
        return Finding("memory", "limited", f"{text}; a model with its workers needs more", "stop other processes")
    return Finding("memory", "ok", text)


def shared_memory_finding() -> Finding:
    """Return size and free bytes of shared memory."""
    hint = "start the container with a larger --shm-size, such as 8g"
    if not _SHARED_MEMORY.is_dir():
        return Finding("shared memory", "limited", f"there is no {_SHARED_MEMORY}", hint)
    usage = shutil.disk_usage(_SHARED_MEMORY)
    text = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB of {_SHARED_MEMORY} are free"
    if usage.free < _ENOUGH_SHARED_MEMORY:
        return Finding("shared memory", "limited", f"{text}; weights and Ray's objects pass through it", hint)
    return Finding("shared memory", "ok", text)


def open_files_finding() -> Finding:
    """Return the limit of open files, against the need of a worker with the default options."""
    limit, needed = raise_descriptor_limit(), count_needed(RolloutConfig().max_in_flight)
    text = f"a process may have {limit:,} open files"
    if limit < needed:
        text += f"; a worker whose agents are programs needs up to {needed:,}: {count_fitting(limit):,} of them fit"
        return Finding("open files", "limited", text, "raise `ulimit -Hn`, or lower rollout.max_in_flight")
    return Finding("open files", "ok", text)


def _meminfo(key: str) -> int:
    """Return a number of Linux's memory information in bytes, or 0."""
    lines = [line.split() for line in _read(Path("/proc/meminfo")).splitlines()]
    return next((int(words[1]) * 1024 for words in lines if words[:1] == [f"{key}:"]), 0)


def _read(path: Path) -> str:
    """Return the text of a file of the kernel, or an empty text where it does not exist."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
