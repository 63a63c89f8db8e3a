"""The conformance suite of group rewards: `turnwise_testing.checks.group_reward`, one test each."""

from __future__ import annotations

import pytest

from turnwise.protocols import Resources
from turnwise_testing.checks.group_reward import GROUP_REWARD_CHECKS, GroupExample, GroupRewardProbe
from turnwise_testing.probes.agent import probe_chat
from turnwise_testing.suites.plugin import PluginSuite


class GroupRewardSuite(PluginSuite):
    """
    The conformance suite of group rewards. A plugin's whole file::

        class TestShortest(GroupRewardSuite):
            entry_point = "shortest"
            module = "turnwise_shortest"
            registered = "shortest"

            @pytest.fixture
            def examples(self):
                return (GroupExample(answers=("It is 42.", "42"), expected=(0.0, 1.0)),)

    Must be overridden: the fixture `examples`. May be: `config`, `resources` and `probe`.
    """

    hook = "register_group_rewards"
    checks = GROUP_REWARD_CHECKS

    @pytest.fixture
    def resources(self) -> Resources:
        """A chat template over bytes; may be overridden."""
        return Resources(chat=probe_chat())

    @pytest.fixture
    def examples(self) -> tuple[GroupExample, ...]:
        """Groups of answers with their expected scores; must be overridden."""
        raise NotImplementedError("override the fixture 'examples' with GroupExamples")

    @pytest.fixture
    def probe(self, config: object, resources: Resources, examples: tuple[GroupExample, ...]) -> GroupRewardProbe:
        """The probe of the group reward; may be overridden."""
        factory = self.entry().factory
        return GroupRewardProbe(
            make_reward=lambda: factory(config, resources),
            examples=tuple(examples),
            chat=resources.chat or probe_chat(),
        )
