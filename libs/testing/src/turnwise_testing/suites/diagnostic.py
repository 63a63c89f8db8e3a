"""The conformance suite of diagnostics: `turnwise_testing.checks.diagnostic`, one test each."""

from __future__ import annotations

import pytest

from turnwise.protocols import Resources
from turnwise_testing.checks.diagnostic import DIAGNOSTIC_CHECKS, DiagnosticProbe
from turnwise_testing.suites.plugin import PluginSuite


class DiagnosticSuite(PluginSuite):
    """
    The conformance suite of diagnostics. A plugin's whole file::

        class TestDiskSpace(DiagnosticSuite):
            entry_point = "disk_space"
            module = "turnwise_disk_space"
            registered = "disk_space"

    May be overridden: `resources`.
    """

    hook = "register_diagnostics"
    checks = DIAGNOSTIC_CHECKS

    @pytest.fixture
    def probe(self, config: object, resources: Resources) -> DiagnosticProbe:
        """The probe of the diagnostic; may be overridden."""
        factory = self.entry().factory
        return DiagnosticProbe(make_diagnostic=lambda: factory(config, resources))
