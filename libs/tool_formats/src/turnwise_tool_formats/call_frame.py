"""The text around the arguments of calls."""

from __future__ import annotations

import json

from attrs import frozen


@frozen
class CallFrame:
    """
    The text of calls in a format that writes arguments as JSON.

    Attributes:
        before: text of a call up to the JSON of its arguments.
        after: text behind them.
        between: text between two calls.
        first: text before the first call.
        last: text behind the last one.
        openings: texts that begin calls, so that a text without calls has none of them.
        number_at: where `before` has a number of one or two digits, which counts the calls; -1 for nowhere.
    """

    before: str
    after: str
    between: str
    first: str = ""
    last: str = ""
    openings: tuple[str, ...] = ()
    number_at: int = -1

    @property
    def head(self) -> tuple[str, str]:
        """The parts of `before` around its number; without a number the second is empty."""
        at = len(self.before) if self.number_at < 0 else self.number_at
        return self.before[:at], self.before[at:]

    def write(self, arguments: str, number: int) -> str:
        """Return a call, without the texts around all calls, from the JSON of its arguments and its number, from 0."""
        start, rest = self.head
        return f"{start}{'' if self.number_at < 0 else number}{rest}{arguments}{self.after}"

    def example(self) -> str:
        """Return a call without arguments."""
        return f"{self.first}{self.write('{}', 0)}{self.last}"


def frame_list(first: str, name: str, last: str, openings: tuple[str, ...]) -> CallFrame:
    """Return the frame of calls in a JSON list of objects, each with a name and arguments."""
    return CallFrame(f'{{"name": {json.dumps(name)}, "arguments": ', "}", ", ", first, last, openings)
