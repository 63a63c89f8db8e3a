"""The conformance suite of reasoning parsers: `turnwise_testing.checks.reasoning`, one test each."""

from __future__ import annotations

import pytest

from turnwise.protocols import Resources
from turnwise_testing.checks.reasoning import REASONING_CHECKS, ReasoningProbe
from turnwise_testing.suites.plugin import PluginSuite


class ReasoningParserSuite(PluginSuite):
    """
    The conformance suite of reasoning parsers. A plugin's whole file::

        class TestThinkTags(ReasoningParserSuite):
            entry_point = "think_tags"
            module = "turnwise_think_tags"
            registered = "think_tags"

            @pytest.fixture
            def examples(self):
                return (("<think>17 + 25</think>It is 42.", "17 + 25", "It is 42."),)

    Must be overridden: the fixture `examples`. May be: `config`, `resources` and `probe`.
    """

    hook = "register_reasoning_parsers"
    checks = REASONING_CHECKS

    @pytest.fixture
    def examples(self) -> tuple[tuple[str, str, str], ...]:
        """Turns, each with its reasoning and the rest of the text; must be overridden."""
        raise NotImplementedError("override the fixture 'examples' with (turn, reasoning, rest)")

    @pytest.fixture
    def probe(self, config: object, resources: Resources, examples: tuple[tuple[str, str, str], ...]) -> ReasoningProbe:
        """The probe of the parser; may be overridden."""
        factory = self.entry().factory
        return ReasoningProbe(make_parser=lambda: factory(config, resources), examples=tuple(examples))
