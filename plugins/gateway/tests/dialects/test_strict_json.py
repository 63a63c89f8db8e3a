"""JSON is strict in both directions."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_gateway.calls import CallRefusedError
from turnwise_gateway.dialects.strict_json import read_json, write_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON))
def test_round_trip(value):
    """Every JSON object comes back as it was, in escapes or in UTF-8."""
    assert value == read_json(write_json(value))
    assert value == read_json(json.dumps(value, ensure_ascii=False).encode("utf-8"))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "Expecting value"),
        (b"[]", "not an object"),
        (b"5", "not an object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": {"b": 1, "b": 1}}', "given twice"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udFFf": 1}', "surrogate"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        (b'{"a": 1} x', "text after its JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deeply"),
    ],
)
def test_refused_bodies(body, reason):
    """A body that readers could understand differently is refused with a reason."""
    with pytest.raises(CallRefusedError, match="the body is malformed") as refused:
        read_json(body)

    assert "invalid" == refused.value.kind
    assert reason in refused.value.message


def test_pairs_of_surrogates_are_text():
    """Both halves of a pair are one character."""
    assert {"a": "\U0001f600"} == read_json(b'{"a": "\\ud83d\\ude00"}')


@pytest.mark.parametrize(("depth", "fine"), [(99, True), (100, False), (400, False), (990, False)])
def test_nesting_is_bounded(depth, fine):
    """Nesting has a limit far below the stack of any later reader."""
    body = b'{"a": ' + b"[" * depth + b"]" * depth + b"}"
    if fine:
        read_json(body)
    else:
        with pytest.raises(CallRefusedError, match="nested"):
            read_json(body)


def test_numbers_without_json_are_not_written():
    """NaN is an error and not a word that other readers refuse."""
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json({"a": math.nan})
