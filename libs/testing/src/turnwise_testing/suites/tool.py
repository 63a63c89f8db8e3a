"""The conformance suite of tools: `turnwise_testing.checks.tool`, one test each."""

from __future__ import annotations

import pytest

from turnwise.protocols import Resources
from turnwise_testing.checks.tool import TOOL_CHECKS, ToolExample, ToolProbe
from turnwise_testing.suites.plugin import PluginSuite


class ToolSuite(PluginSuite):
    """
    The conformance suite of tools and sets of tools. A plugin's whole file::

        class TestAdd(ToolSuite):
            entry_point = "add"
            module = "turnwise_add"
            registered = "add"

            @pytest.fixture
            def examples(self):
                return (ToolExample(arguments={"a": 2, "b": 3}, text="5"),)

    Must be overridden: the fixture `examples`. May be: `config`, `resources` and `probe`.
    """

    hook = "register_tools"
    checks = TOOL_CHECKS

    @pytest.fixture
    def examples(self) -> tuple[ToolExample, ...]:
        """Calls with their expected results; must be overridden."""
        raise NotImplementedError("override the fixture 'examples' with ToolExamples")

    @pytest.fixture
    def probe(self, config: object, resources: Resources, examples: tuple[ToolExample, ...]) -> ToolProbe:
        """The probe of the tool; may be overridden."""
        factory = self.entry().factory
        return ToolProbe(make_tool=lambda: factory(config, resources), examples=tuple(examples))
