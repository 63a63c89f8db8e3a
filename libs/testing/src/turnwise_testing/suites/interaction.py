"""The conformance suite of user simulators: `turnwise_testing.checks.interaction`, one test each."""

from __future__ import annotations

import pytest

from turnwise.protocols import Resources
from turnwise_testing.checks.interaction import INTERACTION_CHECKS, InteractionProbe
from turnwise_testing.probes.agent import probe_chat
from turnwise_testing.suites.plugin import PluginSuite


class InteractionSuite(PluginSuite):
    """
    The conformance suite of user simulators. A plugin's whole file::

        class TestImpatientUser(InteractionSuite):
            entry_point = "impatient_user"
            module = "turnwise_impatient_user"
            registered = "impatient_user"

    May be overridden: `config`, `resources` and `probe`, which has the answers of the model and the task.
    """

    hook = "register_interactions"
    checks = INTERACTION_CHECKS

    @pytest.fixture
    def resources(self) -> Resources:
        """A chat template over bytes; may be overridden."""
        return Resources(chat=probe_chat())

    @pytest.fixture
    def probe(self, config: object, resources: Resources) -> InteractionProbe:
        """The probe of the simulator; may be overridden."""
        factory = self.entry().factory
        return InteractionProbe(make_interaction=lambda: factory(config, resources))
