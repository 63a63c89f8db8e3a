"""The conformance suite of routers: `turnwise_testing.checks.router`, one test each."""

from __future__ import annotations

import pytest

from turnwise.protocols import Resources
from turnwise_testing.checks.router import ROUTER_CHECKS, RouterProbe
from turnwise_testing.suites.plugin import PluginSuite


class RouterSuite(PluginSuite):
    """
    The conformance suite of routers. A plugin's whole file::

        class TestFewestTokens(RouterSuite):
            entry_point = "fewest_tokens"
            module = "turnwise_fewest_tokens"
            registered = "fewest_tokens"

    May be overridden: `config` and `resources`.
    """

    hook = "register_routers"
    checks = ROUTER_CHECKS

    @pytest.fixture
    def probe(self, config: object, resources: Resources) -> RouterProbe:
        """The probe of the router."""
        factory = self.entry().factory
        return RouterProbe(make_router=lambda: factory(config, resources))
