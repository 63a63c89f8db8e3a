"""The text around the arguments of a call, from which a grammar of calls is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, runtime_checkable

from turnwise import ToolParser
from turnwise.protocols import FormattedParser
from turnwise.types import JsonObject
from turnwise_tool_formats.call_frame import CallFrame as CallFrame
from turnwise_tool_formats.turn import dump_json

_PROBE: Final = {"turnwise_probe": [1, {"place": "arguments"}]}
"""Arguments whose JSON no format has by itself."""


@runtime_checkable
class FramingFormat(Protocol):
    """A parser, or its `turnwise.protocols.ToolFormat`, that knows the text around the arguments of its calls."""

    def frame(self, name: str) -> CallFrame | None:
        """Return the frame of calls of a tool; None if the format writes arguments in another form than JSON."""


def frame_call(write: Callable[[str, Sequence[tuple[str, JsonObject]]], str], name: str) -> CallFrame | None:
    """Return the frame of calls of a tool by what a format writes; None if there is none."""
    call, arguments = (name, _PROBE), dump_json(_PROBE)
    one, two = write("", [call]), write("", [call, call])
    before, found, after = one.partition(arguments)
    if not found or arguments in after or not (two.startswith(one) and two.endswith(one) and len(two) >= 2 * len(one)):
        return None
    # The tag before its JSON, or else the JSON up to the tool's name.
    start = before.partition(name)[0]
    opening = start.partition("{")[0].strip() or start.strip()
    return CallFrame(before, after, two[len(one) : len(two) - len(one)], openings=(opening,))


def find_frame(parser: ToolParser, name: str) -> CallFrame | None:
    """Return the frame of calls of a tool in the format of a parser; None if the format has none."""
    if isinstance(parser, FramingFormat):
        return parser.frame(name)
    tool_format = parser.tool_format if isinstance(parser, FormattedParser) else None
    return tool_format.frame(name) if isinstance(tool_format, FramingFormat) else None
