"""The conformance suite of weight transports: `turnwise_testing.checks.transport`, one test each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from turnwise.protocols import Resources
from turnwise_testing.checks.transport import TRANSPORT_CHECKS, MakeTransport, TransportProbe, some_weights
from turnwise_testing.suites.plugin import PluginSuite


class WeightTransportSuite(PluginSuite):
    """
    The conformance suite of weight transports, both ends in one process.

    May be overridden: `config`, `resources`, `make_transport`, and `weights`, which makes the published weights.
    """

    hook = "register_weight_transports"
    checks = TRANSPORT_CHECKS

    @pytest.fixture
    def make_transport(self, config: object, resources: Resources) -> MakeTransport:
        """A maker of transports; may be overridden."""
        factory = self.entry().factory
        return lambda: factory(config, resources)

    @pytest.fixture
    def weights(self) -> Callable[[int], dict[str, Any]]:
        """A function of a seed; may be overridden."""
        return some_weights

    @pytest.fixture
    def probe(self, make_transport: MakeTransport, weights: Callable[[int], dict[str, Any]]) -> TransportProbe:
        """The probe of the transport."""
        return TransportProbe(make_transport=make_transport, weights=weights)
