"""The conformance suites of losses and advantages: `turnwise_testing.checks.objective`, one test each."""

from __future__ import annotations

import pytest

from turnwise.protocols import Resources
from turnwise_testing.checks.objective import ADVANTAGE_CHECKS, LOSS_CHECKS, AdvantageProbe, LossProbe
from turnwise_testing.suites.plugin import PluginSuite


class LossSuite(PluginSuite):
    """
    The conformance suite of losses. A plugin's whole file::

        class TestMyLoss(LossSuite):
            entry_point = "my_loss"
            module = "turnwise_my_loss"
            registered = "my_loss"

    May be overridden: `config` and `resources`.
    """

    hook = "register_losses"
    checks = LOSS_CHECKS

    @pytest.fixture
    def probe(self, config: object, resources: Resources) -> LossProbe:
        """The probe of the loss."""
        factory = self.entry().factory
        return LossProbe(make_loss=lambda: factory(config, resources))


class AdvantageSuite(PluginSuite):
    """The conformance suite of advantages; used as `LossSuite`."""

    hook = "register_advantages"
    checks = ADVANTAGE_CHECKS

    @pytest.fixture
    def probe(self, config: object, resources: Resources) -> AdvantageProbe:
        """The probe of the estimator."""
        factory = self.entry().factory
        return AdvantageProbe(make_estimator=lambda: factory(config, resources))
