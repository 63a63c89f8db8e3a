"""The suite of tool parsers takes a format that writes every argument as a text, and finds mistakes of its parser."""

import pytest

from turnwise_testing.checks.parser import PARSER_CHECKS

pytestmark = pytest.mark.usefixtures("starts_a_process")

PLUGIN = """
import re

from attrs import field, frozen

from turnwise import NoConfig, Resources, ToolCall, hookimpl

CALL = re.compile(r'<do tool="([^"]*)">(.*?)(?:(</do>)|\\Z)', re.DOTALL)
ARGUMENT = re.compile(r"<(\\w+)>(.*?)</\\1>", re.DOTALL)


@frozen
class DoTags:
    config: NoConfig
    resources: Resources = field(repr=False)

    def parse(self, token_ids):
        text = self.resources.chat.text(token_ids)
        return CALL.sub("", text), tuple(map(read_call, CALL.finditer(text)))


def read_call(match):
    name, body, end = match.groups()
    if not name or not end or ARGUMENT.sub("", body):
        return ToolCall(name=name, error="Error: write a call as <do tool=NAME><ARGUMENT>text</ARGUMENT></do>")
    return ToolCall(name=name, arguments=dict(ARGUMENT.findall(body)), raw=match[0])


@hookimpl
def register_tool_parsers(registry):
    registry.add("do_tags", DoTags)
"""
CONFORMANCE = """
import pytest
from turnwise_testing import ToolParserSuite


class TestDoTags(ToolParserSuite):
    entry_point = module = "turnwise_do_tags"
    registered = "do_tags"
    typed_arguments = False

    @pytest.fixture
    def write_call(self):
        def write(name, arguments):
            return f'<do tool="{name}">' + "".join(f"<{k}>{v}</{k}>" for k, v in arguments.items()) + "</do>"

        return write

    @pytest.fixture
    def malformed(self):
        return ('<do tool="add"><a>1</a>', '<do tool=""></do>', '<do tool="add"><a>1</b></do>')
"""
READ = "dict(ARGUMENT.findall(body))"
MISTAKES = {
    "guesses types": (READ, "{k: int(v) if v.lstrip('-').isdecimal() else v for k, v in ARGUMENT.findall(body)}"),
    "strips values": (READ, "{k: v.strip() for k, v in ARGUMENT.findall(body)}"),
    "takes cut calls": ("not name or not end or", "not name or"),
    "loses line breaks": (READ, "{k: ' '.join(v.splitlines()) for k, v in ARGUMENT.findall(body)}"),
}
FOUND = {
    "guesses types": {"a_good_call_is_found", "calls_keep_their_order", "random_conversations"},
    "strips values": {"random_conversations"},
    "takes cut calls": {"malformed_is_a_value", "a_turn_may_be_cut_anywhere", "a_turn_may_be_cut_at_every_character"},
    "loses line breaks": {"a_good_call_is_found", "calls_keep_their_order", "random_conversations"},
}
"""Tests that must fail, by mistake."""


def failed(outcomes):
    return {name for name, outcome in outcomes.items() if outcome != "passed"}


def test_a_good_parser_passes(run_conformance):
    """All checks run, and each passes; the parser reads only whole turns, so the check of streams is skipped."""
    outcomes = run_conformance("turnwise_do_tags", PLUGIN, CONFORMANCE)

    assert set(PARSER_CHECKS) < set(outcomes)
    assert outcomes.pop("a_stream_of_a_turn_takes_nothing_back") == "skipped"
    assert failed(outcomes) == set()


@pytest.mark.many_cases(1)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(run_conformance, mistake):
    """The tests that are about it fail."""
    good, bad = MISTAKES[mistake]
    assert PLUGIN.count(good) == 1

    outcomes = run_conformance("turnwise_do_tags", PLUGIN.replace(good, bad), CONFORMANCE)

    assert FOUND[mistake] <= failed(outcomes)


def test_the_suite_wants_types_unless_it_is_told(run_conformance):
    """The parser fails where the suite writes numbers and objects, as in a format of JSON."""
    outcomes = run_conformance("turnwise_do_tags", PLUGIN, CONFORMANCE.replace("typed_arguments = False", ""))

    assert {"a_good_call_is_found", "calls_keep_their_order", "random_conversations"} <= failed(outcomes)
