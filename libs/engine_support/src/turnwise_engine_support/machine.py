"""The machine that this process runs on: GPU drivers, CPU features, shared memory. No tensor library is loaded."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Final

SHARED_MEMORY: Final = Path("/dev/shm")
_VISIBLE: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_DRIVERS: Final = ("/proc/driver/nvidia/version", "/dev/kfd")
_CPU_INFO: Final = Path("/proc/cpuinfo")


def has_gpu() -> bool:
    """
    Return whether this process can use a GPU.

    True if a driver for NVIDIA or AMD GPUs is loaded and no environment variable hides the GPUs: Ray gives an actor
    without GPUs an empty list of them.
    """
    hidden = any(os.environ.get(name, "0").strip() in ("", "-1") for name in _VISIBLE)
    return not hidden and any(Path(path).exists() for path in _DRIVERS)


def cpu_flags() -> frozenset[str]:
    """Return the features of an x86-64 CPU by Linux's names, such as `avx512f`; empty if they are unknown."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def is_linux_x86() -> bool:
    """Return whether this is Linux on x86-64, which the CPU builds of vLLM and SGLang need."""
    return platform.system() == "Linux" and platform.machine() in ("x86_64", "AMD64")


def shared_memory() -> tuple[int, int] | None:
    """Return the size and the free bytes of shared memory, or None if there is none."""
    if not SHARED_MEMORY.is_dir():
        return None
    usage = shutil.disk_usage(SHARED_MEMORY)
    return usage.total, usage.free
