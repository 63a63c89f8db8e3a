"""`hermes` passes the conformance suite of tool parsers."""

import json

import pytest

from turnwise_testing.parser_suite import ToolParserSuite


class TestHermes(ToolParserSuite):
    """The suite with default options."""

    entry_point = "hermes_parser"
    module = "turnwise_hermes_parser"
    registered = "hermes"

    @pytest.fixture
    def write_call(self):
        """Writes a call as Hermes and Qwen models do."""
        return lambda name, args: f"<tool_call>\n{json.dumps({'name': name, 'arguments': args})}\n</tool_call>"

    @pytest.fixture
    def malformed(self):
        """Invalid JSON, no JSON, no object, and no closing tag."""
        return (
            "<tool_call>{</tool_call>",
            "<tool_call></tool_call>",
            "<tool_call>[1]</tool_call>",
            "So: <tool_call>{}",
        )
