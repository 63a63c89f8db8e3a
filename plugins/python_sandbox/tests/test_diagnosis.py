"""The diagnosis of the sandbox: requirements, self-tests and promises, on machines of any kind."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

from turnwise import Finding
from turnwise_python_sandbox import SandboxUnavailableError, Tier, diagnosis
from turnwise_python_sandbox.diagnosis import diagnose
from turnwise_python_sandbox.selftest import SelfTestResult

pytestmark = pytest.mark.usefixtures("starts_a_process")

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the tiers of Linux")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A Linux machine on which everything works; a test can take parts away."""
    results = [SelfTestResult(tier=tier, landlock_abi=7) for tier in (Tier.NAMESPACES, Tier.LANDLOCK)]
    monkeypatch.setattr(diagnosis, "run_selftests", lambda: results)
    monkeypatch.setattr(diagnosis.sys, "platform", "linux")
    monkeypatch.setattr(diagnosis.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(diagnosis.landlock, "detect_abi", lambda: 7)
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "host", "6.18", "1", "x86_64")))
    return monkeypatch


@pytest.fixture
def fail_tiers(machine: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Sets why tier 1 and tier 2 fail; empty for a tier that works."""

    def fail(first: str, second: str) -> None:
        tiers = ((Tier.NAMESPACES, first), (Tier.LANDLOCK, second))
        results = [SelfTestResult(tier=tier, failure=failure) for tier, failure in tiers]
        machine.setattr(diagnosis, "run_selftests", lambda: results)

    return fail


def find(item: str) -> Finding:
    """Return the finding of an item."""
    (found,) = [finding for finding in diagnose() if finding.item == item]
    return found


@on_linux
def test_this_machine_is_diagnosed() -> None:
    """The real self-tests run, and their results are the findings of the tiers and of the sandbox."""
    results = diagnosis.run_selftests()
    findings = {finding.item: finding for finding in diagnose()}

    assert [Tier.NAMESPACES, Tier.LANDLOCK] == [result.tier for result in results]
    for result, item in zip(results, ("tier 1 (namespaces)", "tier 2 (landlock)"), strict=True):
        assert (findings[item].state == "ok") is not bool(result.failure)
    assert (findings["sandbox"].state == "missing") is all(result.failure for result in results)


@pytest.mark.parametrize(
    ("first", "second", "states"),
    [
        ("", "", ("ok", "ok", "ok")),
        ("no namespaces", "", ("limited", "ok", "limited")),
        ("", "no Landlock", ("ok", "limited", "ok")),
        ("no namespaces", "no Landlock", ("missing", "missing", "missing")),
    ],
)
def test_the_best_tier_decides(fail_tiers, first: str, second: str, states: tuple[str, ...]) -> None:
    """A failed tier limits the sandbox if the other one works; without a tier the sandbox is missing."""
    fail_tiers(first, second)
    tiers = [find("tier 1 (namespaces)"), find("tier 2 (landlock)")]

    assert states == (*(tier.state for tier in tiers), find("sandbox").state)
    assert [first in tiers[0].explanation, second in tiers[1].explanation] == [True, True]
    assert all("programs" in tier.explanation for tier in tiers), "each tier states its promise"


@pytest.mark.parametrize("failures", [("", ""), ("leaks", ""), ("leaks", "leaks")])
def test_each_finding_is_one_line(fail_tiers, failures: tuple[str, str]) -> None:
    """Every item has one finding, every explanation is one line, and the sandbox comes last."""
    fail_tiers(*failures)
    findings = diagnose()

    assert "sandbox" == findings[-1].item
    assert len({finding.item for finding in findings}) == len(findings)
    for finding in findings:
        assert finding.explanation
        assert "\n" not in finding.explanation + finding.hint


def test_a_complete_machine_needs_no_remedy(machine) -> None:
    """With everything present each state is ok, and nothing is left to do."""
    assert {("ok", "")} == {(finding.state, finding.hint) for finding in diagnose()}


@pytest.mark.parametrize(("failures", "state"), [(("no bubblewrap", ""), "limited"), (("x", "y"), "missing")])
def test_a_missing_bubblewrap_names_its_package(machine, fail_tiers, failures: tuple[str, str], state: str) -> None:
    """Its absence is a limit while tier 2 works, and the hint is the package."""
    fail_tiers(*failures)
    machine.setattr(diagnosis.shutil, "which", lambda _name: None)

    assert (state, "apt-get install bubblewrap") == (find("bubblewrap").state, find("bubblewrap").hint)


@pytest.mark.parametrize(
    ("abi", "state", "words"),
    [
        (0, "limited", "Linux 5.13"),
        (1, "limited", "Linux 6.12"),
        (5, "limited", "Linux 6.12"),
        (6, "ok", ""),
        (9, "ok", ""),
    ],
)
def test_landlock_is_judged_by_its_abi(machine, abi: int, state: str, words: str) -> None:
    """Without Landlock, and before ABI 6, the hint names the version of Linux."""
    machine.setattr(diagnosis.landlock, "detect_abi", lambda: abi)

    assert state == find("Landlock").state
    assert words in find("Landlock").hint


def test_an_unknown_processor_is_missing(machine) -> None:
    """No tier works without a system call table; the hint has the processors with one."""
    machine.setattr(os, "uname", lambda: os.uname_result(("Linux", "host", "6.18", "1", "riscv64")))
    found = find("seccomp")

    assert ("missing", "use one of x86_64, aarch64") == (found.state, found.hint)
    assert "riscv64" in found.explanation


def test_an_interpreter_that_does_not_run_names_its_option(machine) -> None:
    """The hint is the option `python`."""

    def fail(_python: str) -> None:
        raise SandboxUnavailableError("cannot run the interpreter '/x'")

    machine.setattr(diagnosis, "find_interpreter", fail)
    found = find("interpreter")

    assert ("missing", "cannot run the interpreter '/x'") == (found.state, found.explanation)
    assert "`python`" in found.hint


def test_tier_2_alone_names_the_stronger_tier(fail_tiers) -> None:
    """Runs work, and the hint is to mend tier 1."""
    fail_tiers("no namespaces", "")

    assert "runs use tier 2 (landlock)" == find("sandbox").explanation
    assert "tier 1 (namespaces)" in find("sandbox").hint


def test_without_a_tier_the_other_ways_are_named(fail_tiers) -> None:
    """The hint has both options that still run code."""
    fail_tiers("no namespaces", "no Landlock")

    assert "remote_url" in find("sandbox").hint
    assert "unsafe_subprocess: true" in find("sandbox").hint


def test_macos_has_tier_3_only(monkeypatch) -> None:
    """It is limited to development, and nothing of Linux is asked for."""
    monkeypatch.setattr(diagnosis.sys, "platform", "darwin")
    findings = diagnose()

    assert ["interpreter", "tier 3 (seatbelt)", "sandbox"] == [finding.item for finding in findings]
    assert ["limited", "limited"] == [finding.state for finding in findings[1:]]


def test_another_system_has_no_tier(monkeypatch) -> None:
    """Each tier says that it needs Linux, and the sandbox is missing."""
    monkeypatch.setattr(diagnosis.sys, "platform", "win32")
    findings = diagnose()

    assert ["missing"] * 3 == [finding.state for finding in findings[1:]]
    assert "it needs Linux" in findings[1].explanation


def test_a_tier_that_cannot_be_tested_reports_why(monkeypatch) -> None:
    """An error before the self-test becomes the failure of the tier, and the diagnosis continues."""

    def fail(_config: object, tier: Tier) -> None:
        raise SandboxUnavailableError(f"no user for tier {tier}")

    monkeypatch.setattr(diagnosis, "build_server_spec", fail)

    assert ["no user for tier 1", "no user for tier 2"] == [each.failure for each in diagnosis.run_selftests()]
