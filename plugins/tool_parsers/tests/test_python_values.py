"""The reader of values reads them as Python does."""

import ast
import unicodedata
import warnings

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from turnwise_strict_json import MalformedError
from turnwise_tool_parsers.python_values import read_python_call

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
PIECES = [
    "(", ")", "[", "]", "{", "}", ",", ":", " ", "1", "-2", "+3", "0.5", ".5", "5.", "1e3", "007", "00", "0", "00.5",
    "True", "None", '"a"', "'b'", '"""c"""', "'''d\n'''", '""', '"k": ',
]  # fmt: skip
ESCAPES = [
    "\\N{BULLET}", "\\N{bullet}", "\\N{LATIN SMALL LETTER A}", "\\N{ALERT}", "\\N{NO SUCH NAME}", "\\N", "\\N{",
    "\\N{}",
    "\\N{KEYCAP NUMBER SIGN}", "{BULLET}", "\\x41", "\\x4", "\\x", "\\u0041", "\\u004", "\\U0001F30D", "\\U0001F30",
    "\\101", "\\0", "\\8", "\\777", "\\n", "\\t", "\\\\", "\\'", '\\"', "\\d", "\\\n", "\\ ", "a", "é", "🌍", "}",
]  # fmt: skip


def read(source):
    """Return the value of an argument; a bracket too many ends the call before its end."""
    (_name, arguments), stop = read_python_call(f"f(a={source})", 0)
    if len(f"f(a={source})") != stop:
        raise MalformedError("the call ends before its end")
    return arguments["a"]


def read_as_python(source):
    """Return Python's own value, whose tuples are lists; None twice where Python refuses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return True, as_json(ast.literal_eval(source.strip()))
        except (ValueError, SyntaxError):
            return False, None


def as_json(value):
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return {key: as_json(each) for key, each in value.items()} if isinstance(value, dict) else value


def assert_same(source):
    """A value is read as Python reads it."""
    try:
        found = read(source)
    except MalformedError:
        return
    known, expected = read_as_python(source)
    assert known, source
    assert (repr(expected), expected) == (repr(found), found)


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ('("x")', "x"),
        ("(5)", 5),
        ("((5))", 5),
        ("(5,)", [5]),
        ("((5,),)", [[5]]),
        ("()", []),
        ("([])", []),
        ("([1])", [1]),
        ("(())", []),
        ("((),)", [[]]),
        ('({"a": (1)})', {"a": 1}),
        ("[(1), (2,), (3, 4)]", [1, [2], [3, 4]]),
        ("(None)", None),
        ("(1, (2))", [1, 2]),
        ("[5]", [5]),
        (r'"\N{BULLET}"', "•"),
        (r'"a\N{latin small letter b}\x63"', "abc"),
        (r"'''\N{ALERT}'''", "\a"),
        (r'{"\N{BULLET}": 1}', {"•": 1}),
        (r'"\\N{BULLET}"', r"\N{BULLET}"),
        ("00", 0),
        ("01.5", 1.5),
    ],
)
def test_examples(source, value):
    """Brackets without a comma only group, and escapes have names."""
    assert value == read(source)
    assert_same(source)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (r'"\N{NO SUCH NAME}"', r"\\N{NO SUCH NAME} is no character"),
        (r'"\N{KEYCAP NUMBER SIGN}"', r"\\N{KEYCAP NUMBER SIGN} is no character"),
        (r'"\N"', r"\\N starts no complete escape"),
        (r'"\N{BULLET"', r"\\N starts no complete escape"),
        (r'"\x4"', r"\\x starts no complete escape"),
        (r'"\u12"', r"\\u starts no complete escape"),
        (r'"\U0001F30"', r"\\U starts no complete escape"),
        ("02134", "02134 is no number: write texts in quotes"),
        ("-007", "-007 is no number: write texts in quotes"),
    ],
)
def test_text_that_python_refuses(source, why):
    """The error names it."""
    assert (False, None) == read_as_python(source)
    with pytest.raises(MalformedError, match=why):
        read(source)


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@example("(1)")
@example('("a")')
@example("(1)(2)")
@example("[(1),]")
@example("('a' 'b')")
def test_brackets_are_read_as_python_reads_them(source):
    """Or refused; a list around them makes each comma one of the value."""
    assert_same(f"[{source}]")


@given(st.lists(st.sampled_from(ESCAPES), max_size=8).map("".join), st.sampled_from(['"', "'", '"""', "'''"]))
@example("\\N{BULLET}", '"')
def test_escapes_are_read_as_python_reads_them(body, quote):
    """Or refused; line breaks in plain quotes, which Python refuses, are read."""
    source = quote + body + quote
    if read_as_python(source)[0]:
        assert_same(source)


@given(st.characters(exclude_categories=["Cs", "Cc", "Co", "Cn"]))
def test_each_character_has_its_name(character):
    """As in Python."""
    name = unicodedata.name(character, "")

    assert not name or character == read(f'"\\N{{{name}}}"')


VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(VALUES, st.integers(0, 3))
def test_values_in_any_number_of_brackets(value, num_brackets):
    """Brackets around a value change nothing."""
    assert as_json(value) == read("(" * num_brackets + repr(value) + ")" * num_brackets)


@given(VALUES, st.integers(0, 3))
def test_cut_calls_are_no_calls(value, num_brackets):
    """The closing bracket of the call is its last character."""
    text = "f(a=" + "(" * num_brackets + repr(value) + ")" * num_brackets + ")"
    for cut in range(len(text)):
        with pytest.raises(MalformedError):
            read_python_call(text[:cut], 0)
