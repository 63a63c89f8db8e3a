"""
Finds the calls in the text of a turn.

Tags are found in the decoded text, so their tokenization changes nothing. A tag inside the JSON of a well-formed call,
or inside reasoning, is text. Parsing time is linear in the length of the text, for any text.
"""

from __future__ import annotations

import re
from typing import Any, Final

from attrs import define

from turnwise import Chat, ToolCall
from turnwise.errors import ConfigError
from turnwise.types import TokenArray
from turnwise_hermes_parser.call import MalformedError, build_call, malformed_call, read_json, skip_space
from turnwise_hermes_parser.config import HermesConfig


class HermesParser:
    """
    The tool parser `hermes`.

    Args:
        config: tags and limits of calls.
        chat: decodes the token ids of a turn.

    Raises:
        ConfigError: `chat` is None.
    """

    def __init__(self, config: HermesConfig, chat: Chat | None) -> None:
        if chat is None:
            raise ConfigError("tool parser 'hermes' reads text: the run needs a model directory with a tokenizer")
        self._chat: Final = chat
        self._config: Final = config
        self._opening: Final = _compile_tags(config.open_tag, config.reasoning_open_tag)
        self._call_tag: Final = _compile_tags(config.open_tag, config.close_tag)

    def parse(self, token_ids: TokenArray) -> tuple[str, tuple[ToolCall, ...]]:
        try:
            text = self._chat.text(token_ids)
        except Exception as error:  # noqa: BLE001 - tokenizers raise anything for unknown ids; parsing never raises
            return "", (malformed_call(f"its tokens cannot be decoded ({type(error).__name__})", ""),)
        return self.parse_text(text)

    def parse_text(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text outside the calls, reasoning included, and the calls in order."""
        if self._config.open_tag not in text:
            return text, ()
        content: list[str] = []
        calls: list[ToolCall] = []
        reader = _CallReader(text, self._config, self._call_tag)
        kept, at = 0, self._after_first_reasoning(text)
        while at >= 0 and (tag := self._opening.search(text, at)):
            if tag.group() == self._config.reasoning_open_tag:
                at = self._after_reasoning(text, tag.end())
                continue
            content.append(text[kept : tag.start()])
            call, at = reader.read(tag.end())
            calls.append(call)
            kept = at
        content.append(text[kept:])
        return "".join(content), tuple(calls)

    def _after_first_reasoning(self, text: str) -> int:
        return self._after_reasoning(text, 0) if self._config.starts_in_reasoning else 0

    def _after_reasoning(self, text: str, start: int) -> int:
        """Return the index after the reasoning that contains `start`; -1 if it does not end."""
        close = text.find(self._config.reasoning_close_tag, start)
        return close if close < 0 else close + len(self._config.reasoning_close_tag)


@define
class _CallReader:
    """Reads the calls of one text. `spent` estimates the characters that failed attempts have read."""

    text: str
    config: HermesConfig
    call_tag: re.Pattern[str]
    spent: int = 0

    def read(self, start: int) -> tuple[ToolCall, int]:
        """Read the call whose JSON starts at `start`; return it and the index at which the search continues."""
        try:
            value, stop = self._read_json(start)
        except MalformedError as error:
            return self._read_malformed(start, start, str(error))
        end = skip_space(self.text, stop)
        if self.text.startswith(self.config.close_tag, end):
            call = build_call(value, self.text[start:end], self.config.max_depth)
            return call, end + len(self.config.close_tag)
        return self._read_malformed(start, stop, "there is text after its JSON")

    def _read_json(self, start: int) -> tuple[Any, int]:
        # JSON strings may contain tags, so the JSON decides where a call ends. A failed attempt may read to the end of
        # the text, which makes many failed attempts quadratic. Beyond a limit, calls therefore end at the next tag.
        if self.spent <= 2 * len(self.text):
            try:
                return read_json(self.text, start)
            except MalformedError:
                self.spent += len(self.text) // 8
                raise
        tag = self.call_tag.search(self.text, start)
        value, stop = read_json(self.text[start : tag.start() if tag else None], 0)
        return value, start + stop

    def _read_malformed(self, start: int, search_from: int, why: str) -> tuple[ToolCall, int]:
        """Return a malformed call that ends at the next tag, or at the end of the text."""
        tag = self.call_tag.search(self.text, search_from)
        if tag is None:
            return malformed_call("its closing tag is missing", self.text[start:]), len(self.text)
        raw = self.text[start : tag.start()]
        if tag.group() == self.config.open_tag:
            return malformed_call("its closing tag is missing", raw), tag.start()
        return malformed_call(why if raw.strip() else "it is empty", raw), tag.end()


def _compile_tags(*tags: str) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(tag) for tag in tags if tag))
