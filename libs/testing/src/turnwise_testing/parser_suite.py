"""The conformance suite of tool parsers: `turnwise_testing.parser_checks`, one test each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from turnwise.protocols import Resources
from turnwise_testing.agent_probe import probe_chat
from turnwise_testing.parser_checks import PARSER_CHECKS, ParserProbe
from turnwise_testing.suite import PluginSuite

WriteCall = Callable[[str, Mapping[str, Any]], str]


class ToolParserSuite(PluginSuite):
    """
    The conformance suite of tool parsers. A plugin's whole file::

        class TestAcme(ToolParserSuite):
            entry_point = "acme_parser"
            module = "turnwise_acme_parser"
            registered = "acme"

            @pytest.fixture
            def write_call(self):
                return lambda name, arguments: f"[{name}]{json.dumps(arguments)}[end]"

            @pytest.fixture
            def malformed(self):
                return ("[add]{[end]", "[add]{}")

    Must be overridden: the fixtures `write_call` and `malformed`. May be: `config`, `resources` and `probe`.
    """

    hook = "register_tool_parsers"
    checks = PARSER_CHECKS

    @pytest.fixture
    def resources(self) -> Resources:
        """A chat template over bytes; may be overridden."""
        return Resources(chat=probe_chat())

    @pytest.fixture
    def write_call(self) -> WriteCall:
        """Writes a call, from a name and arguments, as the model would; must be overridden."""
        raise NotImplementedError("override the fixture 'write_call' with a function of a name and arguments")

    @pytest.fixture
    def malformed(self) -> tuple[str, ...]:
        """Texts of calls that cannot be run; must be overridden."""
        raise NotImplementedError("override the fixture 'malformed' with texts of calls that cannot be run")

    @pytest.fixture
    def probe(
        self, config: object, resources: Resources, write_call: WriteCall, malformed: tuple[str, ...]
    ) -> ParserProbe:
        """The probe of the parser; may be overridden."""
        assert resources.chat is not None, "parsers read with resources.chat"
        parser = self.entry().factory(config, resources)
        return ParserProbe(parser=parser, chat=resources.chat, write_call=write_call, malformed=tuple(malformed))
