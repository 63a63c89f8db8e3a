"""
gpt-oss: messages of the harmony format that have a recipient.

    call      = header "<|message|>" OBJECT ["<|call|>"]
    header    = "<|channel|>" CHANNEL " to=" recipient type | " to=" recipient "<|channel|>" CHANNEL type
    recipient = ["functions."] NAME
    type      = [" "] ["<|constrain|>"] ["json"]

Source: OpenAI's harmony guide and the chat template of gpt-oss-20b. Engines stop at `<|call|>`, so it may be missing.
Messages without a recipient, such as the reasoning in the channel `analysis`, are text, and so is all that they hold. A
message with one is a call in any channel, whatever else its header has: models write odd headers, and the text of a
call must not end an episode as its answer.
"""

from __future__ import annotations

import re
from typing import Final

from turnwise_strict_json import MalformedError, read_json
from turnwise_tool_formats.following import Waiting
from turnwise_tool_formats.json_stream import follow_arguments
from turnwise_tool_formats.turn import Found, Grammar, Turn, TurnFollower, first_call
from turnwise_tool_parsers.harmony import ENDS, MESSAGE, START, HarmonyReasoning, count_settled, read_messages

_RECIPIENT: Final = re.compile(r"to=(?:\s*+(functions\.[^\s<]*+)|([^\s<]*+))")
_WHOLE: Final = re.compile(r"(?s:.*)")


class GptOss(Grammar):
    """The format `gpt_oss`."""

    name = "gpt_oss"
    form = "<|channel|>commentary to=functions.<tool> <|constrain|>json<|message|>{...}<|call|>."
    opening = re.escape(START)
    closing = ENDS
    reasoning_parser = HarmonyReasoning()

    def find(self, turn: Turn, at: int, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Return the header of the next call."""
        call = next((message for message in read_messages(turn.text, at) if message.is_call), None)
        return _WHOLE.match(turn.text, call.start, call.stop) if call else None

    def settled(self, turn: Turn) -> int | None:
        return count_settled(turn.text)

    def wait_for_opening(self, follower: TurnFollower, at: int) -> Waiting[re.Match[str]]:
        while True:
            for message in read_messages(follower.text, at):
                if message.is_call and message.tag:
                    header = _WHOLE.match(follower.text, message.start, message.stop)
                    assert header is not None, "the pattern matches any text"
                    return header
                at = message.first
            follower.settled = count_settled(follower.text, at)
            yield

    def follow(self, follower: TurnFollower, opening: re.Match[str]) -> Waiting[int | None]:
        name, mistake = _read_recipient(opening.group())
        if mistake or not follower.text.startswith(MESSAGE, opening.end()):
            raise MalformedError(mistake or "the text is missing")
        call = follower.begin(name, opening.end() + len(MESSAGE))
        stop = yield from follow_arguments(follower, call, call.taken)
        tag, after = yield from follower.skip_tag((*ENDS, START), stop)
        if not tag:
            raise MalformedError("there is text after its JSON")
        follower.check(lambda turn: first_call(self.read(turn, opening)))
        call.complete()
        return stop if tag == START else after

    def read(self, turn: Turn, opening: re.Match[str]) -> Found | None:
        start, stop = opening.span()
        name, mistake = _read_recipient(opening.group())
        if not turn.text.startswith(MESSAGE, stop):
            after = max(turn.skip(tag, stop) for tag in ENDS)
            why = f"{MESSAGE} is missing after its header"
            return [turn.refuse(why, opening.group(), name)], max(after, stop)
        body = stop + len(MESSAGE)
        try:
            arguments, stop = turn.read_value(read_json, body)
        except MalformedError as error:
            return turn.refuse_to_next_tag(mistake or str(error), start, body, name)
        after = max(turn.skip(tag, stop) for tag in ENDS)
        if after < 0 and turn.skip_space(stop) < len(turn.text) and turn.skip(START, stop) < 0:
            return turn.refuse_to_next_tag(mistake or "there is text after its JSON", start, stop, name)
        raw = turn.text[start:stop]
        call = turn.refuse(mistake, raw, name) if mistake else turn.build(name, arguments, raw)
        return [call], max(after, stop)


def _read_recipient(header: str) -> tuple[str, str]:
    """Return the name of the tool, and the mistake in the recipient; one of both is empty."""
    found = {(each[1] or each[2]).removeprefix("functions.") for each in _RECIPIENT.finditer(header)}
    if len(found) > 1:
        return "", "its header has several recipients"
    (name,) = found
    if not name:
        return "", "the recipient after to= is missing"
    if name == "assistant":
        return "", "its recipient is 'assistant', and only results of tools have this one"
    return name, ""
