"""The conformance suite of rewards: `turnwise_testing.reward_checks`, one test each."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.protocols import Resources, Reward
from turnwise_testing.agent_probe import probe_chat
from turnwise_testing.reward_checks import REWARD_CHECKS, RewardExample, RewardProbe
from turnwise_testing.suite import PluginSuite


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

    def test_fulfils_the_protocol(self, probe: RewardProbe) -> None:
        """The factory returns something with the method of a reward."""
        assert isinstance(probe.make_reward(), Reward)

    def test_returns_a_score(self, probe: RewardProbe) -> None:
        """Every example has a finite `Score` that fits its trajectory."""
        run(probe, "returns_a_score")

    def test_expected_values(self, probe: RewardProbe) -> None:
        """Examples with an expected score get that score."""
        run(probe, "expected_values")

    def test_is_repeatable(self, probe: RewardProbe) -> None:
        """The same episode has the same score, in any order, from one object or from several."""
        run(probe, "is_repeatable")

    def test_many_at_once_do_not_mix(self, probe: RewardProbe) -> None:
        """One object scores many episodes at once, each as it does alone."""
        run(probe, "many_at_once_do_not_mix")

    def test_empty_response_has_a_score(self, probe: RewardProbe) -> None:
        """A model that wrote nothing, or only ended its turn, is scored and fails nothing."""
        run(probe, "empty_response_has_a_score")

    def test_cut_response_has_a_score(self, probe: RewardProbe) -> None:
        """An answer that the budget cut anywhere, in a character too, is scored."""
        run(probe, "cut_response_has_a_score")


def run(probe: RewardProbe, name: str) -> None:
    """Run one check in a new event loop."""
    asyncio.run(REWARD_CHECKS[name](probe))
