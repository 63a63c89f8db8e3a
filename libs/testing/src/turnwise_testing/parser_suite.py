"""The conformance suite of tool parsers: `turnwise_testing.parser_checks`, one test each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from turnwise.protocols import Resources, ToolParser
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

    def test_fulfils_the_protocol(self, probe: ParserProbe) -> None:
        """The factory returns something with the method of a parser."""
        assert isinstance(probe.parser, ToolParser)

    def test_plain_text_has_no_calls(self, probe: ParserProbe) -> None:
        """A text without calls comes back as it is."""
        PARSER_CHECKS["plain_text_has_no_calls"](probe)

    def test_a_good_call_is_found(self, probe: ParserProbe) -> None:
        """Name and arguments equal the written ones, for any JSON value."""
        PARSER_CHECKS["a_good_call_is_found"](probe)

    def test_calls_keep_their_order(self, probe: ParserProbe) -> None:
        """Several calls of one turn are found in order, and the text around them is the content."""
        PARSER_CHECKS["calls_keep_their_order"](probe)

    def test_end_of_turn_changes_nothing(self, probe: ParserProbe) -> None:
        """The end-of-turn token that an engine returns with a turn is no part of a call."""
        PARSER_CHECKS["end_of_turn_changes_nothing"](probe)

    def test_malformed_is_a_value(self, probe: ParserProbe) -> None:
        """A malformed call is a `ToolCall` with a text for the model in `error`; nothing is raised."""
        PARSER_CHECKS["malformed_is_a_value"](probe)

    def test_a_turn_may_be_cut_anywhere(self, probe: ParserProbe) -> None:
        """Every prefix of a turn parses, and calls that ended before the cut are found."""
        PARSER_CHECKS["a_turn_may_be_cut_anywhere"](probe)

    def test_splitting_changes_nothing(self, probe: ParserProbe) -> None:
        """The same text in other tokens has the same calls."""
        if probe.tags_are_tokens:
            pytest.skip("the parser finds tags by their ids")
        PARSER_CHECKS["splitting_changes_nothing"](probe)

    def test_any_ids_have_an_answer(self, probe: ParserProbe) -> None:
        """Shuffled turns, bytes at random and ids beyond the vocabulary are parsed without raising."""
        PARSER_CHECKS["any_ids_have_an_answer"](probe)

    def test_is_repeatable(self, probe: ParserProbe) -> None:
        """The parser keeps nothing: the same ids have the same answer, whatever came between."""
        PARSER_CHECKS["is_repeatable"](probe)
