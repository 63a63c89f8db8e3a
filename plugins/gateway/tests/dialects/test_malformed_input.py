"""The dialect Messages has an object for malformed arguments, also when a stream has begun to send them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_gateway.dialects.malformed_input import MALFORMED, find_malformed, write_input, write_input_delta

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=4).map(json.dumps)


@st.composite
def begun(draw):
    """The start of an object, up to a place at which no number, word or escape is cut."""
    text = draw(OBJECTS)
    places = [size for size in range(len(text)) if is_begun(text[:size])]
    return text[: draw(st.sampled_from(places))]


def is_begun(text):
    """Return whether a stream may have sent this start of an object."""
    return not text or (text[-1] in '{}[]",: ' and not text.endswith("\\"))


@given(begun(), st.sampled_from(["", "oops", "]", "}}", "\n</tool_call>", '{"', "\u00e9"]))
def test_a_stream_of_malformed_arguments_is_an_object(sent, rest):
    """Its values are null, so that no half of a text passes for the argument; an echo of it is the sampled text."""
    arguments = sent + rest
    written = json.loads(sent + write_input_delta(arguments, rest))

    if write_input(arguments).get(MALFORMED) == arguments:
        assert written.pop(MALFORMED) == arguments
        assert set(written.values()) <= {None}
        assert find_malformed({**written, MALFORMED: arguments}) == arguments
    else:
        assert written == json.loads(arguments)


@pytest.mark.parametrize(
    ("sent", "rest", "expected"),
    [
        ('{"path": "a", "text": "ha', "</tool_call>", {"path": None, "text": None}),
        ('{"path"', " oops", {"path": None}),
        ('{"a": [1, {"b": "', "", {"a": None}),
        ("{", "", {}),
        ("", "oops", {}),
    ],
)
def test_what_was_begun_gets_an_end(sent, rest, expected):
    """Texts, keys, lists and objects are closed."""
    written = json.loads(sent + write_input_delta(sent + rest, rest))

    assert written == {**expected, MALFORMED: sent + rest}


def test_good_arguments_stay_as_they_are():
    """The rest is what the model wrote."""
    assert write_input_delta('{"a":  1.0}', "  1.0}") == "  1.0}"


@pytest.mark.parametrize("values", [{MALFORMED: 5}, {MALFORMED: "x", "a": 1}, {"a": None}])
def test_other_objects_are_arguments(values):
    """The key alone says nothing."""
    assert find_malformed(values) is None
