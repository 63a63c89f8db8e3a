"""Every JSON text is read as `json` reads it, and any other is refused with a reason."""

import json
import math
from decimal import Decimal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from turnwise_strict_json import MalformedError, check_value, find_mistake, load_json, read_arguments, read_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(JSON, st.booleans())
def test_json_comes_back(value, ascii_only):
    """In escapes or in the characters themselves, with white space around it."""
    text = json.dumps(value, ensure_ascii=ascii_only)

    assert value == load_json(f" {text}\n")
    assert (value, len(text) + 2) == read_json(f"x {text} y", 2)
    check_value(value, text, 100)


NUMBERS = st.from_regex(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", fullmatch=True) | st.builds(
    "{}{}.{}{}{}".format,
    st.sampled_from(["", "-"]),
    st.integers(0, 10**400),
    st.integers(0, 10**30),
    st.sampled_from(["e", "E", "e-", "E+"]),
    st.integers(0, 10**30),
)
"""Numbers that the grammar of JSON allows, and so the grammar of a constrained reply."""


@settings(deadline=None)
@given(NUMBERS)
@example("8E935566767")
@example("-8E935566767")
@example("1e308")
@example("1e309")
@example("1e-935566767")
@example(f"0.{'0' * 5000}1e{'9' * 5000}")
@example("9" * 4300)
@example("9" * 4301)
@example(f"1{'0' * 5000}.5")
def test_numbers_of_the_grammar_of_json(text):
    """Each is read as Python reads it, exactly as an integer or rounded as a float; an infinite one is an error."""
    is_integer = text.lstrip("-").isdigit()
    whole = f'{{"a": {text}}}'
    if len(text.lstrip("-")) > 4300 if is_integer else math.isinf(float(text)):
        assert read_arguments(whole) is None
        with pytest.raises(MalformedError) as refused:
            load_json(whole)
        assert len(str(refused.value)) < 120
        return
    value = load_json(whole)["a"]
    assert (json.loads(text), int if is_integer else float) == (value, type(value))
    assert Decimal(text) == value if is_integer else math.isfinite(value)


@given(st.text() | st.text('{}[]",:\\\\ud8aé \n19eE.-'))
def test_any_text(text):
    """The arguments of a call are an object that can be written again, or nothing; no text raises an error."""
    values = read_arguments(text)

    assert values is None or json.loads(text) == values
    if values is not None:
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is not valid JSON: Expecting value at character 0"),
        ("\xa01", "it is not valid JSON: Expecting value at character 0"),
        ("{} x", "there is text after its JSON"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        ('{"a": 1e999}', "the number 1e999 is too large"),
        (f'{{"a": {"9" * 999}.5}}', f"the number {'9' * 40}... is too large"),
        ('{"a": {"b": 1, "b": 2}}', 'the key "b" is given twice'),
        ("9" * 5000, "it is not valid JSON: an integer has more than 4300 digits"),
        ("[" * 100_000, "its JSON is nested too deeply"),
    ],
)
def test_texts_that_are_no_json(text, reason):
    """The reason names the mistake."""
    with pytest.raises(MalformedError) as refused:
        load_json(text)

    assert str(refused.value).startswith(reason)
    assert read_arguments(text) is None


@given(st.lists(JSON), st.sampled_from(['{"b": 1, "b": 2}', '{"b": NaN}', '{"b": 1e999}']), st.lists(JSON))
def test_the_place_of_a_mistake(before, wrong, after):
    """It is the innermost object that has the mistake, or the place that the scanner reports."""
    values = [json.dumps(value, indent=1) for value in before] + [f'{{"a": [{wrong}]}}'] + list(map(json.dumps, after))
    text = f"\n[{', '.join(values)}]"
    with pytest.raises(MalformedError) as refused:
        load_json(text)

    assert len(f"\n[{', '.join([*values[: len(before)], ''])}") + len('{"a": [') == find_mistake(text, refused.value)
    with pytest.raises(MalformedError) as refused:
        load_json(text.replace(wrong, "}"))
    assert refused.value.position == find_mistake(text, refused.value) is not None


def test_a_mistake_without_a_place():
    """A value that is no object, and nesting too deep to look for it, have the start of the text."""
    for text in ("NaN", "[" * 100_000, "[" * 500 + '{"a": 1, "a": 2}' + "]" * 500):
        with pytest.raises(MalformedError) as refused:
            load_json(text)
        assert 0 == find_mistake(text, refused.value)


@pytest.mark.parametrize(("depth", "fine"), [(5, True), (6, False), (900, False)])
@pytest.mark.parametrize(("opening", "closing"), ["[]", ('{"a":', "}")])
def test_nesting_is_bounded(depth, fine, opening, closing):
    """Up to the limit a value is read; brackets beside each other are no nesting."""
    text = opening * depth + "1" + closing * depth
    if fine:
        check_value(load_json(text), text, 5)
    else:
        with pytest.raises(MalformedError, match="nested more than 5 levels"):
            check_value(load_json(text), text, 5)
    check_value(load_json("[[1],[2],[3],[4],[5],[6]]"), "[[1],[2],[3],[4],[5],[6]]", 5)


@pytest.mark.parametrize("text", ['"\\ud800"', '{"\\udFFf": 1}', '["\\uDbff a"]'])
def test_half_a_surrogate_pair_is_refused(text):
    """Both halves are one character."""
    with pytest.raises(MalformedError, match="half of a surrogate pair"):
        check_value(load_json(text), text, 9)
    assert {"a": "\U0001f600"} == read_arguments('{"a": "\\ud83d\\ude00"}')
    assert read_arguments('{"a": "\ud800"}') is None
