"""
Writes tools and calls as text, for models whose chat template shows no tools.

All that is written is read back at once: a tool whose call the parser would not find is refused, before a model is told
to call it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from attrs import define, field

from turnwise import ToolCall
from turnwise.errors import TemplateError
from turnwise.types import JsonObject, ToolSchema
from turnwise_tool_formats.examples import example_call, schema_of_value
from turnwise_tool_formats.frames import CallFrame, frame_call
from turnwise_tool_formats.schema_values import ArgumentTypes
from turnwise_tool_formats.turn import WrittenGrammar, dump_json

_HEAD: Final = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
_MAX_DESCRIBED: Final = 64
Read = Callable[[str, ArgumentTypes], Sequence[ToolCall]]
Call = tuple[str, JsonObject]


@define(eq=False)
class WrittenFormat:
    """
    `turnwise.protocols.ToolFormat` of a grammar.

    Attributes:
        grammar: the format.
        read: returns the calls of a turn whose arguments have these types.
    """

    grammar: WrittenGrammar
    read: Read
    _described: dict[tuple[str, ...], str] = field(factory=dict, init=False)

    def describe(self, tools: Sequence[ToolSchema]) -> str:
        """
        Return the schemas, the instructions of the format and a call of the first tool, as an example.

        Raises:
            TemplateError: a schema is no JSON, or the parser would not read a call of a tool.
        """
        lines = tuple(map(_dump_schema, tools))
        if (known := self._described.get(lines)) is not None:
            return known
        types = ArgumentTypes(tools)
        examples = [self._write_checked("", example_call(tool), types) for tool in tools]
        text = "\n".join((_HEAD, *lines, "</tools>\n", self.grammar.instructions, examples[0]))
        if len(self._described) >= _MAX_DESCRIBED:
            self._described.clear()
        self._described[lines] = text
        return text

    def write_turn(self, content: str, calls: Sequence[Call]) -> str:
        """Return a turn with calls; `TemplateError` for a call that the parser would not read back."""
        for name, arguments in calls:
            self._write_checked(content, (name, arguments), ArgumentTypes([schema_of_value(name, arguments)]))
        return self.grammar.write(content, calls)

    def frame(self, name: str) -> CallFrame | None:
        """Return the text around the arguments of a tool's calls; None if the format writes them not as JSON."""
        return frame_call(self.grammar.write, name)

    def _write_checked(self, content: str, call: Call, types: ArgumentTypes) -> str:
        text = self.grammar.write(content, [call])
        found = [(each.name, each.arguments) for each in self.read(text, types) if not each.error]
        if not found or not _is_same(found[-1], call):
            name, form = call[0], self.grammar.name
            raise TemplateError(f"the format {form!r} cannot write this call of the tool {name!r}: {text!r:.200}")
        return text


def _dump_schema(tool: ToolSchema) -> str:
    try:
        text = json.dumps(tool, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError as error:  # a number or half of a surrogate pair that JSON in UTF-8 does not have
        raise TemplateError(f"the schema of a tool is no JSON: {error}") from error
    return text


def _is_same(found: tuple[str, Mapping[str, object]], call: Call) -> bool:
    """Return whether two calls are equal, `1` and `True` apart."""
    return found[0] == call[0] and dump_json(found[1]) == dump_json(call[1])
