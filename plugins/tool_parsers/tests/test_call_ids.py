"""A call carries the id that the model wrote, in the formats that have ids."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_testing.inputs.templates import kimi_chat, mistral_chat
from turnwise_tool_parsers.detection import detect_format

MISTRAL_IDS = st.from_regex(r"[A-Za-z0-9]{9}", fullmatch=True)
NAMES = st.from_regex(r"[a-z][a-z_]{0,8}[a-z]", fullmatch=True)
ARGUMENTS = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9), max_size=3)


def mistral_list(name, arguments, call_id):
    return "[TOOL_CALLS] [" + json.dumps({"name": name, "arguments": arguments, "id": call_id}) + "]"


def mistral_list_id_first(name, arguments, call_id):
    return "[TOOL_CALLS][" + json.dumps({"id": call_id, "name": name, "arguments": json.dumps(arguments)}) + "]"


def mistral_v11(name, arguments, call_id):
    return f"[TOOL_CALLS]{name}[CALL_ID]{call_id}[ARGS]{json.dumps(arguments)}"


def kimi(name, arguments, call_id):
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"


WRITERS = {
    "mistral": (mistral_list, mistral_list_id_first, mistral_v11),
    "kimi_k2": (kimi,),
}
FORMS = [(name, write) for name, writers in WRITERS.items() for write in writers]


@pytest.mark.parametrize(("name", "write"), FORMS, ids=[write.__name__ for _name, write in FORMS])
@given(st.data())
def test_ids_are_those_that_the_model_wrote(parser_for, name, write, data):
    """Whatever the arguments, one call or several; an id may come twice."""
    calls = data.draw(st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=4))
    ids = [
        f"functions.{tool}:{data.draw(st.integers(0, 9))}" if name == "kimi_k2" else data.draw(MISTRAL_IDS)
        for tool, _arguments in calls
    ]
    text = "".join(write(tool, arguments, call_id) for (tool, arguments), call_id in zip(calls, ids, strict=True))

    _content, found = parser_for(name).parse_text(text)

    assert ids == [call.id for call in found]
    assert calls == [(call.name, call.arguments) for call in found]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("kimi_k2", "<|tool_call_begin|>add<|tool_call_argument_begin|>{}<|tool_call_end|>", "add"),
        ("kimi_k2", "<|tool_call_begin|>functions.add<|tool_call_argument_begin|>{}", "functions.add"),
        ("kimi_k2", "<|tool_call_begin|>functionsadd0<|tool_call_argument_begin|>{}", "functionsadd0"),
        ("kimi_k2", "<|tool_call_begin|>functions.add:3<|tool_call_argument_begin|>{x", "functions.add:3"),
        ("kimi_k2", "<|tool_call_begin|>functions.add:3{}<|tool_call_end|>", "functions.add:3"),
        ("kimi_k2", "<|tool_call_begin|>7<|tool_call_argument_begin|>{}<|tool_call_end|>", "7"),
        ("kimi_k2", "<|tool_call_begin|><|tool_call_argument_begin|>{}<|tool_call_end|>", None),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": [1], "id": "abcdefghi"}]', "abcdefghi"),
        ("mistral", '[TOOL_CALLS][{"arguments": {}, "id": "abcdefghi"}]', "abcdefghi"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"id": "abcdefghi"}}]', None),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": 7}]', None),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": ""}]', None),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "a\\u0000b"}]', None),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "\\ud800"}]', None),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{x", "abcdefghi"),
        ("mistral", "[TOOL_CALLS]f[CALL_ID] abcdefghi [ARGS]{}", "abcdefghi"),
        ("mistral", "[TOOL_CALLS]f[CALL_ID][ARGS]{}", None),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}", None),
    ],
)
def test_the_id_of_an_odd_call(parser_for, name, text, expected):
    """A malformed call has its id too, for the model must find the error. A text that no client can use is no id."""
    _content, (call,) = parser_for(name).parse_text(text)

    assert expected == call.id


def test_formats_without_ids_have_none(turn, render, parser_for, resources_of):
    """None is invented here."""
    good = ("add", {"a": 1})
    (call,) = parser_for(turn, resources_of(good)).parse_text(render(turn, "", [good]))[1]

    assert turn.startswith(("kimi", "mistral")) or call.id is None


@pytest.mark.parametrize(("chat", "expected"), [(kimi_chat, "kimi_k2"), (mistral_chat, "mistral")])
def test_auto_finds_the_format_of_a_template_that_shows_ids(chat, expected):
    """Kimi's shows the id of a call in the place of its name."""
    assert expected == detect_format(chat()).grammar.name
