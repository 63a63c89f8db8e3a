"""Calls in forms that models write beside those of their templates: other orders of keys, lists and separators."""

import json
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_turns import NAMES
from test_settled import assert_settled

F, G, H = ("f", {"a": 1}), ("g", {"b": "x, {y}"}), ("h", {})
SEPARATORS = [", ", ",", ",\n", "; ", ";", "\n", " ", "", " ,\n\n "]


def good(calls):
    return [(call.name, call.arguments) for call in calls if not call.error]


def obj(call, key="arguments", **more):
    return json.dumps({"name": call[0], key: call[1], **more})


def python(*calls):
    shown = [f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})" for name, values in calls]
    return f"[{', '.join(shown)}]"


STARTS = [
    ("llama3_json", ""),
    ("llama3_json", "\n  "),
    ("llama3_json", "<|python_tag|>"),
    ("llama3_json", "Hm.<|python_tag|>"),
    ("llama3_json", "<think>Hm.</think>\n"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] "),
    ("granite", "<|tool_call|>"),
    ("granite", "<function_call> "),
    ("granite", "<tool_call>\n"),
    ("phi4", "<|tool_call|>"),
    ("phi4", "functools "),
]


@pytest.fixture(scope="module", params=STARTS, ids=[f"{name}-{start!r}" for name, start in STARTS])
def start(request):
    """A format with JSON, and a text after which its calls start."""
    return request.param


@pytest.mark.many_cases
@pytest.mark.parametrize("separator", SEPARATORS)
@pytest.mark.parametrize("lists", [False, True])
def test_joined_json_calls(start, parser_for, separator, lists):
    """Objects or lists with a comma, a semicolon or white space between them are all calls."""
    name, before = start
    calls = [F, G, H]
    shown = [f"[{obj(call)}]" if lists else obj(call) for call in calls]
    text = before + separator.join(shown)
    parse = parser_for(name).parse_text

    assert calls == good(parse(text)[1])
    assert "{" not in parse(text)[0]
    for cut in range(len(text)):
        found = good(parse(text[:cut])[1])
        assert calls[: len(found)] == found
    assert_settled(parser_for(name), text)


def test_a_broken_call_after_a_separator(start, parser_for):
    """It has an error."""
    call, broken = parser_for(start[0]).parse_text(f'{start[1]}{obj(F)}, {{"name": "g", "arguments": }}')[1]

    assert (F, "") == ((call.name, call.arguments), call.error)
    assert "it is not valid JSON" in broken.error


@pytest.mark.parametrize("after", [", and so on.", "; {", " [1, 2]", ' {"result": 3}', "\nDone."])
def test_text_after_calls(start, parser_for, after):
    """It is content, unless a separator and a bracket make it a broken call."""
    content, calls = parser_for(start[0]).parse_text(f"{start[1]}{obj(F)}{after}")

    assert [F] == good(calls)
    assert content.endswith(after) or calls[-1].error


@pytest.mark.many_cases
@pytest.mark.parametrize("order", list(permutations(["name", "parameters", "type", "id"])))
@pytest.mark.parametrize("key", ["parameters", "arguments"])
@pytest.mark.parametrize("indent", [None, 4, 12])
def test_keys_of_llama_in_any_order(parser_for, order, key, indent):
    """An object with a name and arguments is a call; `type` and `id` alone are too little to start one."""
    values = {"name": "f", "parameters": {"a": 1}, "type": "function", "id": "x"}
    text = json.dumps({key if each == "parameters" else each: values[each] for each in order}, indent=indent)
    parser = parser_for("llama3_json")

    assert order[0] == "id" or ("", [F]) == (parser.parse_text(text)[0], good(parser.parse_text(text)[1]))
    assert_settled(parser, text)


@pytest.mark.parametrize(
    "text",
    [
        '{"parameters": {"a": 1}, "name": 3}',
        '{"parameters": {"a": 1,}, "name": "f"}',
        '{"parameters": {"a": 1}, "name": "f"',
        '{"arguments": 3, "name": "f"}',
        '{"parameters": {"a": 1}, "function": "f"}',
        '{"type": "function", "function": {"name": "f", "arguments": {}}}',
        '[{"parameters": {"a": 1}, "name": "f"',
        '[{"name": "f", "parameters": {"a": 1}]',
        '[{"name": "f", "parameters": 3}]',
    ],
)
def test_broken_calls_of_llama(parser_for, text):
    """They have an error, and are no answer."""
    content, calls = parser_for("llama3_json").parse_text(text)

    assert [True] == [bool(call.error) for call in calls]
    assert "" == content


@pytest.mark.parametrize(
    "text",
    [
        '{"parameters": {"learning_rate": 0.1}}',
        '{"parameters": {"learning_rate": 0.1',
        '{"arguments": []}',
        '[{"name": "Ada", "age": 36}]',
        '[{"x": 1}]',
        "[1, 2]",
        '{"type": "function"}',
    ],
)
def test_answers_in_json(parser_for, text):
    """An object without a name or without arguments is no call."""
    assert (text, ()) == parser_for("llama3_json").parse_text(text)


@pytest.mark.parametrize("before", ["", "\n", "<|python_start|>", "Hm.<|python_start|>", "<think>Hm.</think>"])
@pytest.mark.parametrize("separator", SEPARATORS)
def test_joined_lists_of_python_calls(parser_for, before, separator):
    """Every list is read, as if it were one."""
    parser = parser_for("llama4_pythonic")
    text = before + separator.join([python(F), python(G, H), python(F)])

    assert [F, G, H, F] == good(parser.parse_text(text)[1])
    assert "[" not in parser.parse_text(text)[0]
    for cut in range(len(text)):
        found = good(parser.parse_text(text[:cut])[1])
        assert [F, G, H, F][: len(found)] == found
    assert_settled(parser, text)


@pytest.mark.parametrize("after", ["\n[1, 2]", ", [x]", "\n[see g]", " and [g(b=1)]"])
def test_text_after_a_list_of_python_calls(parser_for, after):
    """Other brackets are content."""
    content, calls = parser_for("llama4_pythonic").parse_text(python(F) + after)

    assert (after, [F], 1) == (content, good(calls), len(calls))


def test_a_broken_list_after_a_list(parser_for):
    """It has an error."""
    call, broken = parser_for("llama4_pythonic").parse_text(f"{python(F)}\n[g(b=y)]")[1]

    assert [F] == good([call])
    assert "y is not a value" in broken.error


@pytest.mark.parametrize("space", ["", " ", "  ", "\n", "\n    "])
@pytest.mark.parametrize("inside", ["", " ", "\n  "])
def test_functools_with_white_space(parser_for, space, inside):
    """White space changes nothing."""
    parser = parser_for("phi4")
    text = f"So: functools{space}[{inside}{obj(F)}, {obj(G)}{inside}]"

    assert ("So: ", [F, G]) == (parser.parse_text(text)[0], good(parser.parse_text(text)[1]))
    assert_settled(parser, text)


@pytest.mark.parametrize(
    ("text", "num_calls"),
    [
        (f"functools {obj(F)}", 1),
        (f"functools{obj(F)}", 1),
        (f"functools[{obj(F)}] functools [{obj(G)}]", 2),
        (f"functools[{obj(F)}]\n[{obj(G)}]", 2),
    ],
)
def test_functools_without_a_list(parser_for, text, num_calls):
    """An object is enough, and a second list is read."""
    assert [F, G][:num_calls] == good(parser_for("phi4").parse_text(text)[1])


@pytest.mark.parametrize("text", ["I use functools [the module].", "functools (1)", "functools\n\nis", "functools 3"])
def test_functools_in_prose(parser_for, text):
    """The module of Python is text."""
    assert (text, ()) == parser_for("phi4").parse_text(text)


@pytest.mark.parametrize("separator", SEPARATORS)
@pytest.mark.parametrize("marks", ["[ARGS]", "[CALL_ID]abcdefghi[ARGS]"])
def test_joined_named_calls_of_mistral(parser_for, separator, marks):
    """The tag of the arguments shows that another call starts."""
    parser = parser_for("mistral")
    text = "[TOOL_CALLS]" + separator.join(f"{name}{marks}{json.dumps(values)}" for name, values in (F, G, H))

    assert ("", [F, G, H]) == (parser.parse_text(text)[0], good(parser.parse_text(text)[1]))


@given(st.lists(st.tuples(NAMES, st.just({"a": 1})), min_size=1, max_size=4), st.data())
def test_any_mixture_of_objects_and_lists(start, parser_for, calls, data):
    """However calls are joined, none is lost and none is invented."""
    parts = [f"[{obj(call)}]" if data.draw(st.booleans()) else obj(call) for call in calls]
    text = start[1] + "".join(f"{part}{data.draw(st.sampled_from(SEPARATORS))}" for part in parts)

    assert calls == good(parser_for(start[0]).parse_text(text)[1])
