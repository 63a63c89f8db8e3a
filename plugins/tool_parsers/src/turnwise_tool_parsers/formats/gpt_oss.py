"""
gpt-oss: messages of the harmony format that have a recipient.

    call      = ["<|start|>assistant"] header "<|message|>" OBJECT ["<|call|>"]
    header    = "<|channel|>" CHANNEL " to=" recipient type | " to=" recipient "<|channel|>" CHANNEL type
    recipient = ["functions."] NAME
    type      = [" "] ["<|constrain|>"] ["json"]

Source: OpenAI's harmony guide and the chat template of gpt-oss-20b. A prompt ends with `<|start|>assistant`, so a turn
starts with a header. Engines stop at `<|call|>`, so it may be missing. Messages without a recipient, such as the
reasoning in the channel `analysis`, are text; a message with one is a call in any channel.
"""

from __future__ import annotations

import re

from turnwise_strict_json import MalformedError, read_json
from turnwise_tool_parsers.turn import Found, Grammar, Turn

_CHANNEL = r"<\|channel\|>[a-z]{1,16}"
_ENDS = ("<|call|>", "<|end|>", "<|return|>")


class GptOss(Grammar):
    """The format `gpt_oss`."""

    name = "gpt_oss"
    form = "<|channel|>commentary to=functions.<tool> <|constrain|>json<|message|>{...}<|call|>."
    opening = (
        rf"(?:<\|start\|>assistant)?(?:{_CHANNEL})?\s{{0,4}}\bto=(?P<recipient>[^\s<]{{1,256}}+)(?:\s{{0,4}}{_CHANNEL})?"
        r"\s{0,4}(?:<\|constrain\|>)?[a-z]{0,16}\s{0,4}<\|message\|>"
    )
    closing = _ENDS

    def read(self, turn: Turn, opening: re.Match[str]) -> Found | None:
        start = opening.start()
        name = opening["recipient"].removeprefix("functions.")
        try:
            arguments, stop = turn.read_value(read_json, opening.end())
        except MalformedError as error:
            return turn.refuse_to_next_tag(str(error), start, opening.end(), name)
        call = turn.build(name, arguments, turn.text[start:stop])
        after = max(turn.skip(tag, stop) for tag in _ENDS)
        if after < 0 and turn.skip_space(stop) < len(turn.text) and turn.skip("<|start|>", stop) < 0:
            return turn.refuse_to_next_tag("there is text after its JSON", start, stop, name)
        return [call], max(after, stop)
