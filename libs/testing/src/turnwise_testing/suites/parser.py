"""The conformance suite of tool parsers: `turnwise_testing.checks.parser`, one test each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from attrs import evolve, frozen

from turnwise.protocols import Resources, ToolParser
from turnwise.types import Task, ToolResult, ToolSchema
from turnwise_testing.checks.parser import PARSER_CHECKS, ParserProbe
from turnwise_testing.probes.agent import probe_chat
from turnwise_testing.suites.plugin import PluginSuite

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

    Attributes:
        typed_arguments: the format writes any JSON value; False if it writes every argument as a text.
        quotes_calls: the text of an argument may hold a whole call of the format, as in JSON.
    """

    typed_arguments = True
    quotes_calls = False

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
        factory = self.entry().factory

        def parser_of(schemas: Sequence[ToolSchema]) -> ToolParser:
            tools = {schema["function"]["name"]: _Described(schema) for schema in schemas}
            parser: ToolParser = factory(config, evolve(resources, tools=tools))
            return parser

        return ParserProbe(
            parser=factory(config, resources),
            chat=resources.chat,
            write_call=write_call,
            malformed=tuple(malformed),
            typed_arguments=self.typed_arguments,
            quotes_calls=self.quotes_calls,
            can_write=self.can_write,
            parser_of=parser_of,
        )

    def can_write(self, _arguments: Mapping[str, object]) -> bool:
        """Return whether the format can write these arguments; may be overridden."""
        return True


@frozen
class _Described:
    """A tool that is only its schema."""

    schema: ToolSchema

    async def create(self, task: Task) -> None: ...

    async def execute(self, session: object, arguments: Mapping[str, object]) -> ToolResult:
        return ToolResult(text="")

    async def release(self, session: object) -> None: ...
