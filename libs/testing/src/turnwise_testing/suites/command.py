"""The conformance suite of commands: `turnwise_testing.checks.command`, one test each."""

from __future__ import annotations

import pytest

from turnwise.protocols import Resources
from turnwise_testing.checks.command import COMMAND_CHECKS, CommandExample, CommandProbe
from turnwise_testing.suites.plugin import PluginSuite


class CommandSuite(PluginSuite):
    """
    The conformance suite of commands. A plugin's whole file::

        class TestLengths(CommandSuite):
            entry_point = "lengths"
            module = "turnwise_lengths"
            registered = "lengths"

            @pytest.fixture
            def examples(self):
                return (CommandExample(arguments=["runs/first"], output="mean length"),)

    Must be overridden: the fixture `examples`. May be: `config`, `resources` and `probe`.
    """

    hook = "register_commands"
    checks = COMMAND_CHECKS

    @pytest.fixture
    def examples(self) -> tuple[CommandExample, ...]:
        """Command lines with their results; must be overridden."""
        raise NotImplementedError("override the fixture 'examples' with CommandExamples")

    @pytest.fixture
    def probe(self, config: object, resources: Resources, examples: tuple[CommandExample, ...]) -> CommandProbe:
        """The probe of the command; may be overridden."""
        factory = self.entry().factory
        return CommandProbe(
            make_command=lambda: factory(config, resources), name=self.registered, examples=tuple(examples)
        )
