"""The conformance suite of observers: `turnwise_testing.checks.observer`, one test each."""

from __future__ import annotations

import pytest

from turnwise.protocols import Resources
from turnwise_testing.checks.observer import OBSERVER_CHECKS, ObserverProbe
from turnwise_testing.suites.plugin import PluginSuite


class ObserverSuite(PluginSuite):
    """
    The conformance suite of observers. A plugin's whole file::

        class TestTurnTimes(ObserverSuite):
            entry_point = "turn_times"
            module = "turnwise_turn_times"
            registered = "turn_times"

    May be overridden: `config`, for an observer that writes files or opens ports, and `resources`.
    """

    hook = "register_observers"
    checks = OBSERVER_CHECKS

    @pytest.fixture
    def probe(self, config: object, resources: Resources) -> ObserverProbe:
        """The probe of the observer; may be overridden."""
        factory = self.entry().factory
        return ObserverProbe(make_observer=lambda: factory(config, resources))
