"""The conformance suite of postprocessors: `turnwise_testing.checks.postprocessor`, one test each."""

from __future__ import annotations

import pytest

from turnwise.protocols import Resources
from turnwise_testing.checks.postprocessor import POSTPROCESSOR_CHECKS, PostprocessorProbe
from turnwise_testing.probes.agent import probe_chat
from turnwise_testing.suites.plugin import PluginSuite


class PostprocessorSuite(PluginSuite):
    """
    The conformance suite of postprocessors. A plugin's whole file::

        class TestGroupAdvantage(PostprocessorSuite):
            entry_point = "group_advantage"
            module = "turnwise_group_advantage"
            registered = "group_advantage"

    May be overridden: `config`, `resources` and `probe`, which has the batches.
    """

    hook = "register_postprocessors"
    checks = POSTPROCESSOR_CHECKS

    @pytest.fixture
    def resources(self) -> Resources:
        """A chat template over bytes; may be overridden."""
        return Resources(chat=probe_chat())

    @pytest.fixture
    def probe(self, config: object, resources: Resources) -> PostprocessorProbe:
        """The probe of the postprocessor; may be overridden."""
        factory = self.entry().factory
        return PostprocessorProbe(make_postprocessor=lambda: factory(config, resources))
