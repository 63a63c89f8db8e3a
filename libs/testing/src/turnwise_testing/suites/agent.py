"""The conformance suite of agents: `turnwise_testing.checks.agent`, one test each."""

from __future__ import annotations

import pytest

from turnwise.protocols import Resources
from turnwise_testing.checks.agent import AGENT_CHECKS
from turnwise_testing.probes.agent import AgentProbe, probe_resources
from turnwise_testing.suites.plugin import PluginSuite


class AgentSuite(PluginSuite):
    """
    The conformance suite of agents. A plugin's whole file::

        class TestDebate(AgentSuite):
            entry_point = "debate_agent"
            module = "turnwise_debate_agent"
            registered = "debate"

    May be overridden: the fixtures `config`, `resources`, and `probe`, which has the turns of the scripted model;
    an agent with special tags overrides it with turns that use them.
    """

    hook = "register_agents"
    checks = AGENT_CHECKS

    @pytest.fixture
    def resources(self) -> Resources:
        """A chat template over bytes, a parser and a tool; may be overridden."""
        return probe_resources()

    @pytest.fixture
    def probe(self, config: object, resources: Resources) -> AgentProbe:
        """The probe of the agent; may be overridden."""
        factory = self.entry().factory
        return AgentProbe(make_agent=lambda: factory(config, resources), resources=resources)
