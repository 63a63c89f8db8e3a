"""The parser passes the conformance suite of tool parsers."""

import json

import pytest

from turnwise_testing.suites.parser import ToolParserSuite


class TestHermes(ToolParserSuite):
    """`hermes`, with default options."""

    entry_point = "hermes_parser"
    module = "turnwise_hermes_parser"
    registered = "hermes"
    quotes_calls = True

    @pytest.fixture
    def write_call(self):
        """Writes a call as the chat templates of Hermes and Qwen do."""
        return lambda name, arguments: (
            f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
        )

    @pytest.fixture
    def malformed(self):
        """Texts of calls that cannot be run."""
        return (
            "<tool_call>{</tool_call>",
            "<tool_call></tool_call>",
            "<tool_call>[1]</tool_call>",
            "So: <tool_call>{}",
        )
