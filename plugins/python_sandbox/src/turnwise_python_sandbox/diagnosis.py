"""Diagnosis of the sandbox on this machine: requirements, self-tests and promises of the tiers."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Final

from turnwise import Finding
from turnwise.protocols import FindingState
from turnwise_python_sandbox.box import landlock
from turnwise_python_sandbox.box.syscalls import ARCHITECTURES
from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.interpreter import find_interpreter
from turnwise_python_sandbox.result import SandboxUnavailableError, Tier, format_tier
from turnwise_python_sandbox.selftest import SelfTestResult, build_server_spec, run_selftest

_COMPLETE_LANDLOCK_ABI: Final = 6
_PROMISES: Final = {
    Tier.NAMESPACES: (
        "programs read no file of the host but Python and the system's libraries, and write none; they have no "
        "network; they see, signal and start no process; nothing survives a run; time, memory, output and files are "
        "limited"
    ),
    Tier.LANDLOCK: (
        "as tier 1, but programs can find out whether a path exists, and a file's length, mode and times, not its "
        "contents; they see the host's name; files are measured ten times a second; more of the kernel can be reached"
    ),
    Tier.SEATBELT: (
        "macOS, for development: sandbox-exec, which Apple has deprecated, denies writes and network; memory is not "
        "limited and processes are not hidden"
    ),
}


def run_selftests() -> list[SelfTestResult]:
    """Test each tier of this platform, best first."""
    if sys.platform == "darwin":
        return [SelfTestResult(tier=Tier.SEATBELT)]
    return [_run_selftest(tier) for tier in (Tier.NAMESPACES, Tier.LANDLOCK)]


def diagnose() -> list[Finding]:
    """Test the tiers, which takes about a second; return a finding for each part and, last, one for the sandbox."""
    results = run_selftests()
    default = next((result.tier for result in results if not result.failure), None)
    # A tier that fails, or lacks its requirement, only limits the sandbox if another tier works.
    failed: FindingState = "missing" if default is None else "limited"
    findings = [_diagnose_interpreter()]
    if sys.platform == "linux":
        findings += [_diagnose_bubblewrap(failed), _diagnose_landlock(failed), _diagnose_seccomp()]
    return [*findings, *(_diagnose_tier(result, failed) for result in results), _diagnose_sandbox(results, default)]


def _run_selftest(tier: Tier) -> SelfTestResult:
    try:
        return run_selftest(build_server_spec(SandboxConfig(), tier))
    except SandboxUnavailableError as error:
        return SelfTestResult(tier=tier, failure=str(error))


def _diagnose_interpreter() -> Finding:
    try:
        interpreter = find_interpreter("")
    except SandboxUnavailableError as error:
        return Finding("interpreter", "missing", str(error), "set the option `python` to an interpreter that runs")
    return Finding("interpreter", "ok", f"programs run on {interpreter.executable}")


def _diagnose_bubblewrap(absent: FindingState) -> Finding:
    program = shutil.which("bwrap")
    if program is None:
        return Finding("bubblewrap", absent, "not installed; tier 1 needs it", "apt-get install bubblewrap")
    return Finding("bubblewrap", "ok", f"tier 1 uses {program}")


def _diagnose_landlock(absent: FindingState) -> Finding:
    abi = landlock.detect_abi()
    if not abi:
        hint = "use Linux 5.13 or later, and a container that does not hide Landlock"
        return Finding("Landlock", absent, "not available; tier 2 needs it", hint)
    if abi < _COMPLETE_LANDLOCK_ABI:
        explanation = f"ABI {abi}: seccomp alone blocks signals and abstract sockets"
        hint = f"use Linux 6.12 or later, whose ABI {_COMPLETE_LANDLOCK_ABI} blocks them too"
        return Finding("Landlock", "limited", explanation, hint)
    return Finding("Landlock", "ok", f"ABI {abi}")


def _diagnose_seccomp() -> Finding:
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        explanation = f"no system call table for the processor {machine}"
        return Finding("seccomp", "missing", explanation, f"use one of {', '.join(ARCHITECTURES)}")
    return Finding("seccomp", "ok", f"there is a system call table for {machine}")


def _diagnose_tier(result: SelfTestResult, failed: FindingState) -> Finding:
    item, promise = format_tier(result.tier), _PROMISES[result.tier]
    if result.failure:
        return Finding(item, failed, f"the self-test failed: {result.failure}. The tier would promise: {promise}")
    if result.tier is Tier.SEATBELT:
        return Finding(item, "limited", f"not self-tested. {promise}", "train on Linux")
    return Finding(item, "ok", f"the self-test passed: {promise}")


def _diagnose_sandbox(results: Sequence[SelfTestResult], default: Tier | None) -> Finding:
    if default is None:
        hint = "mend a tier, or set remote_url, or unsafe_subprocess: true"
        return Finding("sandbox", "missing", "no tier works, so runs are refused", hint)
    if default is Tier.NAMESPACES:
        return Finding("sandbox", "ok", f"runs use {format_tier(default)}")
    better = " and ".join(format_tier(result.tier) for result in results if result.tier < default)
    hint = f"mend {better} for stronger isolation" if better else ""
    return Finding("sandbox", "limited", f"runs use {format_tier(default)}", hint)
