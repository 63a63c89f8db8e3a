"""The conformance suite of middleware: `turnwise_testing.checks.middleware`, one test each."""

from __future__ import annotations

import pytest

from turnwise.protocols import Resources
from turnwise_testing.checks.middleware import MIDDLEWARE_CHECKS, MiddlewareProbe
from turnwise_testing.suites.plugin import PluginSuite


class MiddlewareSuite(PluginSuite):
    """
    The conformance suite of middleware. A plugin's whole file::

        class TestRedact(MiddlewareSuite):
            entry_point = "redact"
            module = "turnwise_redact"
            registered = "redact"

    May be overridden: `config`, `resources` and `probe`.
    """

    hook = "register_middleware"
    checks = MIDDLEWARE_CHECKS

    @pytest.fixture
    def probe(self, config: object, resources: Resources) -> MiddlewareProbe:
        """The probe of the middleware; may be overridden."""
        factory = self.entry().factory
        return MiddlewareProbe(make_middleware=lambda: factory(config, resources))
