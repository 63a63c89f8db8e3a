"""Requirements of every diagnostic, as plain functions without pytest; a check takes a `DiagnosticProbe`."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from turnwise.protocols import Diagnostic, Finding
from turnwise_testing.checks.check import Check, register
from turnwise_testing.checks.part import PartChecks
from turnwise_testing.probes.engine import expect


@frozen(kw_only=True)
class DiagnosticProbe:
    """The probe of a diagnostic: `make_diagnostic` builds it, as the registered factory does."""

    make_diagnostic: Callable[[], Diagnostic]


DIAGNOSTIC_CHECKS: dict[str, Check] = {}
"""Every check by the name of its function without `check_`."""
DIAGNOSTICS = PartChecks(
    checks=DIAGNOSTIC_CHECKS,
    probe=lambda part: DiagnosticProbe(make_diagnostic=part.make),
)
_check = register(DIAGNOSTIC_CHECKS)


@_check
def check_fulfils_the_protocol(probe: DiagnosticProbe) -> None:
    """The factory returns an object with the method of a diagnostic."""
    made = probe.make_diagnostic()
    expect(isinstance(made, Diagnostic), f"{type(made).__name__} has no method `diagnose`")


@_check
def check_findings_are_lines(probe: DiagnosticProbe) -> None:
    """Every finding is a `Finding` whose texts are single lines, and all but `ok` ones have a hint."""
    found = list(probe.make_diagnostic().diagnose())
    expect(bool(found), "it found nothing; report `ok` for what works")
    for each in found:
        expect(isinstance(each, Finding), f"diagnose gave {each!r}, expected a Finding")
        texts = (each.item, each.explanation, each.hint)
        expect(not any("\n" in text for text in texts), f"a text of {each!r} has several lines")
        expect(bool(each.item and each.explanation), f"{each!r} has no item or no explanation")
        expect(each.state == "ok" or bool(each.hint), f"{each!r} has no hint")
