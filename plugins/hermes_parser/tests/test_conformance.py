"""`hermes` is a tool parser as every other."""

import json

import pytest

from turnwise.testing.parser_suite import ToolParserSuite


class TestHermes(ToolParserSuite):
    """The standard suite."""

    entry_point = "hermes_parser"
    module = "turnwise_hermes_parser"
    registered = "hermes"

    @pytest.fixture
    def write_call(self):
        """The form that Hermes and Qwen models write."""
        return lambda name, args: f"<tool_call>\n{json.dumps({'name': name, 'arguments': args})}\n</tool_call>"

    @pytest.fixture
    def malformed(self):
        """Broken JSON, no JSON, no object, and no closing tag."""
        return (
            "<tool_call>{</tool_call>",
            "<tool_call></tool_call>",
            "<tool_call>[1]</tool_call>",
            "So: <tool_call>{}",
        )
