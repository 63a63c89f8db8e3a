"""The conformance suite of adapters: `turnwise_testing.checks.adapter`, one test each."""

from __future__ import annotations

import pytest

from turnwise.protocols import Resources
from turnwise_testing.checks.adapter import ADAPTER_CHECKS, AdapterExample, AdapterProbe
from turnwise_testing.suites.plugin import PluginSuite


class AdapterSuite(PluginSuite):
    """
    The conformance suite of adapters. A plugin's whole file::

        class TestPatterns(AdapterSuite):
            entry_point = "patterns"
            module = "turnwise_patterns"
            registered = "patterns"

            @pytest.fixture
            def examples(self):
                return (AdapterExample(kind="rewards", value=re.compile("yes")),)

    Must be overridden: the fixture `examples`. May be: `resources` and `probe`.
    """

    hook = "register_adapters"
    checks = ADAPTER_CHECKS

    @pytest.fixture
    def examples(self) -> tuple[AdapterExample, ...]:
        """Objects that the adapter knows; must be overridden."""
        raise NotImplementedError("override the fixture 'examples' with AdapterExamples")

    @pytest.fixture
    def probe(self, config: object, resources: Resources, examples: tuple[AdapterExample, ...]) -> AdapterProbe:
        """The probe of the adapter; may be overridden."""
        factory = self.entry().factory
        return AdapterProbe(make_adapter=lambda: factory(config, resources), examples=tuple(examples))
