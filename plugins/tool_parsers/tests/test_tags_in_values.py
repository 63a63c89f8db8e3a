"""Closing tags of XML formats inside values: one ends the value only before the next opening tag or the call's end."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_settled import assert_settled

TURNS = ("qwen3_coder", "glm45", "glm47")
CLOSING = {"qwen3_coder": "</parameter>", "glm45": "</arg_value>", "glm47": "</arg_value>"}
PIECES = [
    "</parameter>", "</arg_value>", "</tool_call>", "</function>", "</arg_key>", "<parameter", "<arg_value>",
    "<arg_key", "<arg_key>", "<parameter=>", "<function", "<think>", "</think>", "<tool_call", "\n", " ", "a", "世界",
    "<", ">", "/", "parameter>", "arg_value>",
]  # fmt: skip
VALUES = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
AMBIGUOUS = {
    "</parameter>": re.compile(r"</parameter>\s*</function>|<parameter=|<tool_call>|<function="),
    "</arg_value>": re.compile(r"</arg_value>\s*</tool_call>|<arg_key>|<tool_call>"),
}
"""Texts that no reader can tell from the tags of the call."""


@pytest.fixture(scope="module", params=TURNS)
def xml(request):
    """The name of each renderer of XML."""
    return request.param


def good(calls):
    return [(call.name, call.arguments) for call in calls if not call.error]


@pytest.mark.parametrize("second", [{}, {"b": "x"}])
@pytest.mark.parametrize(
    "text",
    ["a{}b", "{}", "{0}{0}", "{}\nb", "a\n{} <b>", "<x>{}</x>", "a {} <", "</{}", "</tool_call>{}", "a</tool_call>b"],
)
def test_a_value_may_hold_a_closing_tag(xml, render, parser_for, resources_of, text, second):
    """A file may hold the tags of the format that writes it."""
    calls = [("write", {"text": text.format(CLOSING[xml]), **second}), ("add", {"a": 1})]

    content, found = parser_for(xml, resources_of(*calls)).parse_text(render(xml, "So:\n", calls))

    assert calls == good(found)
    assert "So:" == content.strip()


@given(first=VALUES, second=VALUES)
@example(first="</parameter>a", second="</arg_value>")
def test_values_are_exact_or_refused(xml, render, parser_for, resources_of, first, second):
    """Values that can be told from tags are read as they are, and no cut of a turn has another call."""
    calls = [("write", {"text": first, "more": second}), ("add", {"a": 1})]
    parser = parser_for(xml, resources_of(*calls))
    text = render(xml, "So:\n", calls)

    if not any(AMBIGUOUS[CLOSING[xml]].search(value) for value in (first, second)):
        assert calls == good(parser.parse_text(text)[1])
        for cut in range(len(text)):
            found = good(parser.parse_text(text[:cut])[1])
            assert calls[: len(found)] == found
    assert_settled(parser, text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<function=f><parameter=a>1</parameter> b</function>"),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter>"),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter></tool_call>"),
        ("qwen3_coder", "<function=f><parameter=a>1<parameter=b>2</parameter></function>"),
        ("qwen3_coder", "<function=f><parameter=a>1</function><function=g><parameter=b>2</parameter></function>"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value> b</tool_call>"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>"),
        (
            "glm45",
            "<tool_call>f<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>",
        ),
        (
            "glm45",
            "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>"
            "<tool_call>g<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>",
        ),
    ],
)
def test_a_missing_tag_swallows_no_call(parser_for, name, text):
    """The call is malformed, and a call after it is read."""
    call, *others = parser_for(name).parse_text(text)[1]

    assert "'a' has no </" in call.error or "its closing tag is missing" in call.error
    assert [("g", {"b": "2"})][: len(others)] == good(others)
