"""The conformance suite of rewards: `turnwise_testing.checks.reward`, one test each."""

from __future__ import annotations

import pytest

from turnwise.protocols import Resources
from turnwise_testing.checks.reward import REWARD_CHECKS, RewardExample, RewardProbe
from turnwise_testing.probes.agent import probe_chat
from turnwise_testing.suites.plugin import PluginSuite


class RewardSuite(PluginSuite):
    """
    The conformance suite of rewards. A plugin's whole file::

        class TestExactMatch(RewardSuite):
            entry_point = "exact_match"
            module = "turnwise_exact_match"
            registered = "exact_match"

            @pytest.fixture
            def examples(self):
                return (
                    RewardExample(answer="It is 42.", ground_truth="42", expected=1.0),
                    RewardExample(answer="No idea.", ground_truth="42", expected=0.0),
                )

    Must be overridden: the fixture `examples`. May be: `config`, `resources` and `probe`.
    """

    hook = "register_rewards"
    checks = REWARD_CHECKS

    @pytest.fixture
    def resources(self) -> Resources:
        """A chat template over bytes; may be overridden."""
        return Resources(chat=probe_chat())

    @pytest.fixture
    def examples(self) -> tuple[RewardExample, ...]:
        """Answers with their expected scores; must be overridden."""
        raise NotImplementedError("override the fixture 'examples' with RewardExamples")

    @pytest.fixture
    def probe(self, config: object, resources: Resources, examples: tuple[RewardExample, ...]) -> RewardProbe:
        """The probe of the reward; may be overridden."""
        factory = self.entry().factory
        return RewardProbe(
            make_reward=lambda: factory(config, resources),
            examples=tuple(examples),
            chat=resources.chat or probe_chat(),
        )
