"""
Findings of an engine plugin about this machine: packages, devices, memory.

Versions come from package metadata, so that a diagnosis takes milliseconds and works when a package cannot be imported.
"""

from __future__ import annotations

import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from turnwise import Finding
from turnwise_engine_support.machine import cpu_flags, has_gpu, is_linux_x86, shared_memory

_SMALL_SHARED_MEMORY: Final = 1 << 30
_MIB: Final = 1 << 20


def installed_version(*distributions: str) -> tuple[str, str]:
    """Return name and version of the first of these distributions that is installed, or two empty texts."""
    for name in distributions:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return "", ""


def release(text: str) -> tuple[int, ...]:
    """Return the numbers of a version before any suffix, such as (0, 32, 0) for `0.32.0rc1+cpu`."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(number) for number in match[0].split(".")) if match else ()


def package_finding(*distributions: str, tested: str, oldest: str, hint: str, below: str = "") -> Finding:
    """
    Return whether one of some distributions is installed in a version that the engine works with.

    Args:
        distributions: alternatives that provide the same package; the first names the item.
        tested: the version that the tests of the plugin ran with.
        oldest: the oldest version that the plugin accepts.
        hint: the command that installs a working version.
        below: the first version that the plugin does not accept; empty if there is no limit.
    """
    item = distributions[0]
    name, found = installed_version(*distributions)
    if not found:
        return Finding(item, "missing", f"{' or '.join(distributions)} is not installed here", hint)
    if release(found) < release(oldest):
        return Finding(item, "missing", f"{name} {found} is older than {oldest}, the oldest that works", hint)
    if below and release(found) >= release(below):
        return Finding(item, "missing", f"{name} {found} is too new: the engine needs a version below {below}", hint)
    if release(found) != release(tested):
        return Finding(item, "limited", f"{name} {found} is installed; the tests ran with {tested}", hint)
    return Finding(item, "ok", f"{name} {found} is installed, the version that the tests ran with")


def device_finding(build: str, *, gpu_remedy: str, cpu_remedy: str) -> Finding:
    """
    Return whether the installed build of a package fits this machine.

    Args:
        build: `cuda`, `cpu`, or empty for a package that uses a GPU if there is one.
        gpu_remedy: how to install the build for GPUs.
        cpu_remedy: how to install the build for a CPU.
    """
    gpu = has_gpu()
    if build == "cuda" and not gpu:
        return Finding("device", "missing", "the installed build needs a GPU, and none is visible", cpu_remedy)
    if build == "cpu" and gpu:
        return Finding("device", "limited", "the installed build does not use the GPU", gpu_remedy)
    return Finding("device", "ok", "a GPU is visible" if gpu else "no GPU is visible, so the engine runs on the CPU")


def cpu_platform_finding(*, glibc: str = "") -> Finding:
    """
    Return whether the CPU builds of vLLM and SGLang exist for this platform.

    Args:
        glibc: the oldest glibc that works; empty if any does.
    """
    python = platform.python_version()
    name = f"{platform.system()} {platform.machine()}, Python {python}"
    hint = "use Linux on x86-64 with Python 3.11 to 3.13, or a GPU"
    if not is_linux_x86() or not (3, 11) <= sys.version_info < (3, 14):
        return Finding("platform", "missing", f"there is no CPU build for {name}", hint)
    found = platform.libc_ver()[1]
    if glibc and release(found) < release(glibc):
        return Finding("platform", "missing", f"the CPU build needs glibc {glibc}, found {found or 'none'}", hint)
    return Finding("platform", "ok", f"there is a CPU build for {name}")


def avx512_finding(*, required: bool, effect: str) -> Finding:
    """
    Return whether the CPU has AVX-512.

    Args:
        required: whether the engine cannot run on a CPU without it.
        effect: what happens without it, for the explanation.
    """
    flags = cpu_flags()
    if "avx512f" in flags:
        return Finding("AVX-512", "ok", "the CPU has AVX-512")
    known = "the CPU has no AVX-512" if flags else "the features of the CPU are unknown"
    return Finding(
        "AVX-512", "missing" if required else "limited", f"{known}: {effect}", "use a CPU with AVX-512 or a GPU"
    )


def shared_memory_finding(*, use: str, hint: str) -> Finding:
    """
    Return whether `/dev/shm` has room.

    Args:
        use: what the engine puts there, for the explanation.
        hint: how to enlarge it, or to do without.
    """
    sizes = shared_memory()
    if sizes is None:
        return Finding("shared memory", "limited", f"there is no /dev/shm for {use}", hint)
    total, free = sizes
    text = f"/dev/shm has {free // _MIB} of {total // _MIB} MiB free for {use}"
    if free < _SMALL_SHARED_MEMORY:
        return Finding("shared memory", "limited", text, hint)
    return Finding("shared memory", "ok", text)
