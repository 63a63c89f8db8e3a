"""The conformance suite of agents: `turnwise_testing.agent_checks`, one test each."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.protocols import Agent, Resources
from turnwise_testing.agent_checks import AGENT_CHECKS
from turnwise_testing.agent_probe import AgentProbe, probe_resources
from turnwise_testing.suite import PluginSuite


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

    @pytest.fixture
    def resources(self) -> Resources:
        """A chat template over bytes, a parser and a tool; may be overridden."""
        return probe_resources()

    @pytest.fixture
    def probe(self, config: object, resources: Resources) -> AgentProbe:
        """The probe of the agent; may be overridden."""
        factory = self.entry().factory
        return AgentProbe(make_agent=lambda: factory(config, resources), resources=resources)

    def test_fulfils_the_protocol(self, probe: AgentProbe) -> None:
        """The factory returns something with the method of an agent."""
        assert isinstance(probe.make_agent(), Agent)

    def test_finishes(self, probe: AgentProbe) -> None:
        """Every episode ends by itself, completed or truncated, and the agent raised nothing."""
        run(probe, "finishes")

    def test_records_hold(self, probe: AgentProbe) -> None:
        """The record keeps every invariant, and its mask is 1 exactly on the engine's tokens."""
        run(probe, "records_hold")

    def test_last_turn_is_the_models(self, probe: AgentProbe) -> None:
        """Nothing is observed that the model does not answer, whatever the budget."""
        run(probe, "last_turn_is_the_models")

    def test_budget_is_kept(self, probe: AgentProbe) -> None:
        """The response never exceeds the budget, and a small budget ends the episode in good order."""
        run(probe, "budget_is_kept")

    def test_memory_is_json(self, probe: AgentProbe) -> None:
        """After every step, `Episode.memory` survives a round trip through JSON."""
        run(probe, "memory_is_json")

    def test_steps_need_only_the_record_and_memory(self, probe: AgentProbe) -> None:
        """A new agent with the memory out of a checkpoint takes the next step as the old one would have."""
        run(probe, "steps_need_only_the_record_and_memory")

    def test_is_repeatable(self, probe: AgentProbe) -> None:
        """The same task and seed give the same record, on the same agent and on a new one."""
        run(probe, "is_repeatable")

    def test_many_at_once_do_not_mix(self, probe: AgentProbe) -> None:
        """One agent object serves many episodes at once, and each is as it is alone."""
        run(probe, "many_at_once_do_not_mix")

    def test_engine_failure_is_the_engines(self, probe: AgentProbe) -> None:
        """When a generate call fails, the engine owns the episode's failure, and earlier tokens are kept."""
        run(probe, "engine_failure_is_the_engines")

    def test_abort_keeps_what_was_sampled(self, probe: AgentProbe) -> None:
        """An aborted episode ends soon, as aborted, with the tokens that it had."""
        run(probe, "abort_keeps_what_was_sampled")

    def test_deadline_keeps_what_was_sampled(self, probe: AgentProbe) -> None:
        """An episode that is late ends as timed out, with the tokens that it had."""
        run(probe, "deadline_keeps_what_was_sampled")

    def test_long_prompt_is_the_datas(self, probe: AgentProbe) -> None:
        """A prompt that the run does not take fails the episode, owned by the data."""
        run(probe, "long_prompt_is_the_datas")


def run(probe: AgentProbe, name: str) -> None:
    """Run one check in a new event loop."""
    asyncio.run(AGENT_CHECKS[name](probe))
