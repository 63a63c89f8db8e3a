"""Tests of the normal form of messages, and of the names of tolerances."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_gateway.tree.messages import name_tolerances, normalise, normalise_arguments, split_think, tools_key

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**52), 2**52)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), JSON_VALUES, max_size=4)


def assistant(content, **keys):
    return {"role": "assistant", "content": content, **keys}


def calls(*arguments, name="add"):
    return [
        {"id": f"c{index}", "type": "function", "function": {"name": name, "arguments": each}}
        for index, each in enumerate(arguments)
    ]


@given(OBJECTS)
def test_arguments_are_compared_by_value(value):
    """Spaces, the order of keys and escapes do not change the normal form."""
    turned = dict(reversed(value.items()))
    expected = normalise_arguments(json.dumps(value))

    assert expected == normalise_arguments(json.dumps(turned, indent=2))
    assert expected == normalise_arguments(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


@given(OBJECTS, st.text(), st.integers())
def test_another_value_is_another_call(value, key, number):
    """A key with another value changes the normal form."""
    assert normalise_arguments(json.dumps(value | {key: number})) != normalise_arguments(
        json.dumps(value | {key: [number]})
    )


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ('{"x": 1.0}', '{"x": 1}', True),
        ('{"x": 1e3}', '{"x":1000}', True),
        ('{"x": -0.0}', '{"x": 0}', True),
        ('{"x": 1.5}', '{"x": 1}', False),
        ('{"x": true}', '{"x": 1}', False),
        ('{"x": "1"}', '{"x": 1}', False),
        ('{"x": 9007199254740993}', '{"x": 9007199254740992}', False),
        ("not json ", " not json", True),
        ("[" * 100_000, "[" * 100_000, True),
        ('{"x": 1e999}', '{"x": 1e999}', True),
        ('{"x": 1e999}', '{"x": 2e999}', False),
        ('{"x": 8E935566767}', '{"x": Infinity}', False),
    ],
)
def test_numbers_are_compared_by_value(first, second, equal):
    """Whole numbers are equal as floats; other types are other values; a text that is no JSON is compared as text."""
    assert equal == (normalise_arguments(first) == normalise_arguments(second))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\na\n</think>\nb", ("\na\n", "\nb")),
        ("a</think>b", ("a", "b")),
        ("b", ("", "b")),
        ("x <think>a</think>", ("", "x <think>a</think>")),
        ("<think>never closed", ("", "<think>never closed")),
    ],
)
def test_reasoning_is_split_at_its_tags(text, expected):
    """Only reasoning at the start of a turn is split off."""
    assert expected == split_think(text)


def test_a_developer_is_a_system():
    """The role `developer` is another name of `system`."""
    assert normalise({"role": "developer", "content": "a"}) == normalise({"role": "system", "content": "a"})


@pytest.mark.parametrize("message", [assistant(""), assistant(None), assistant(" \n"), {"role": "assistant"}])
def test_empty_turns_are_known(message):
    """An assistant message without text and calls is empty, whatever form its content has."""
    assert normalise(message).is_empty_turn


def test_reasoning_alone_is_empty():
    """A message of reasoning alone is no turn: pydantic-ai sends it before the turn's own message."""
    form = normalise(assistant("<think>\na\n</think>"))

    assert form.is_empty_turn
    assert "a" == form.reasoning


@pytest.mark.parametrize(
    ("own", "echo", "expected"),
    [
        (assistant("a"), assistant("a"), set()),
        (assistant(""), assistant(None), {"null_content"}),
        (assistant(" a\n"), assistant("a"), {"whitespace"}),
        (assistant("a"), assistant("a</code>"), {"stop_string"}),
        (assistant("a", reasoning_content="r"), assistant("a"), {"reasoning_dropped"}),
        (
            assistant("a", reasoning_content=" r\n"),
            assistant("a", reasoning_content=" r\n r\n"),
            {"reasoning_repeated"},
        ),
        (assistant("a", reasoning_content=" r "), assistant("a", reasoning_content="r"), {"whitespace"}),
        (assistant("a", reasoning_content="r"), assistant("<think>r</think>a"), {"think_text"}),
        (assistant("<think>r</think>a"), assistant("a"), {"reasoning_dropped"}),
        (assistant("", tool_calls=calls("{}")), assistant("", tool_calls=calls("{ }")), {"arguments"}),
        (
            assistant("a ", reasoning_content="r", tool_calls=calls('{"x": 1.0}')),
            assistant("a", tool_calls=calls('{"x":1}')),
            {"whitespace", "reasoning_dropped", "arguments"},
        ),
        (assistant("a", tool_calls=calls("{}")), assistant(None, tool_calls=calls("{}")), {"text_dropped"}),
        (
            assistant("<think>r</think>a", tool_calls=calls("{}")),
            assistant("", tool_calls=calls("{ }")),
            {"text_dropped", "reasoning_dropped", "arguments"},
        ),
    ],
)
def test_each_tolerance_has_a_name(own, echo, expected):
    """Every difference that an echo may have is named, so that it can be counted."""
    assert expected == name_tolerances(own, echo)


def test_tools_are_compared_by_value():
    """The order of keys in a schema does not matter; the order of tools does, for the prompt shows it."""
    first, second = {"a": 1, "b": 2}, {"b": 2, "a": 1}

    assert tools_key([first]) == tools_key([second])
    assert tools_key([first, {}]) != tools_key([{}, first])
