"""A turn whose calls a client has written anew, as text in the model's format, is recognised; other calls are not."""

import json
from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from turnwise import Resources
from turnwise.errors import TemplateError
from turnwise_gateway.session.written_calls import find_call_reader
from turnwise_gateway.tree.messages import normalise
from turnwise_gateway.tree.places import ConversationTree, last_turn
from turnwise_testing.probes.agent import ProbeParser, probe_chat
from turnwise_tool_formats.config import ParserConfig
from turnwise_tool_formats.hermes import Hermes
from turnwise_tool_formats.parser import FormatParser
from turnwise_tool_formats.turn import WrittenGrammar
from turnwise_tool_parsers.formats import FORMATS

WRITTEN = {each.name: each for each in (Hermes, *FORMATS) if issubclass(each, WrittenGrammar)}
USER = {"role": "user", "content": "Question?"}
RESULT = {"role": "user", "content": "<tool_response>5</tool_response>"}
WORDS = st.text("abcäö 1", min_size=1, max_size=8).map(str.strip).filter(str.isalpha)
VALUES = st.booleans() | st.integers(-99, 99) | WORDS | st.lists(st.integers(0, 9), max_size=3)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["add", "look_up", "stop"]),
        st.dictionaries(st.sampled_from(["a", "b", "city"]), VALUES, max_size=3),
    ),
    min_size=1,
    max_size=3,
)
TEXTS = st.sampled_from(["", "Let me look.\n", "First this.\n\n"])


@cache
def parser_of(name):
    return FormatParser(WRITTEN[name](), ParserConfig(), Resources(chat=probe_chat()))


class Reader:
    """Reads calls with a parser, and counts how often."""

    def __init__(self, parser):
        self.read, self.number = find_call_reader(parser, probe_chat()), 0

    def __call__(self, text, tools):
        self.number += 1
        return self.read(text, tools)


def grow(turn, parser):
    """A tree with a question and a turn of the model; the reader of its calls; the place of the turn."""
    reader = Reader(parser)
    tree = ConversationTree(read_calls=reader)
    place = tree.add(tree.root("[]"), [USER])
    place.points.append("before")
    turn = tree.add_turn(place, turn)
    turn.points.append("after")
    return tree, reader


def continues(tree, echo):
    """Whether a request with an echo continues the turn, and the tolerances that this needs."""
    location = tree.locate("[]", [USER, echo, RESULT])
    found = last_turn(location.place) is not None and [RESULT] == list(location.rest)
    return found, tree.note(location)


def text(content):
    return {"role": "assistant", "content": content}


def listed(calls, content=""):
    """A turn with its calls as fields, as a request with tools has them."""
    items = [
        {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": items}


def write(name, content, calls, separators=(", ", ": ")):
    """A turn in a format; the JSON of its values has these separators."""
    try:
        written = parser_of(name).tool_format.write_turn(content, calls)
    except TemplateError:
        assume(False)
    for _, arguments in calls if name in ("hermes", "llama3_json") else ():
        usual = json.dumps(arguments, ensure_ascii=False)
        written = written.replace(usual, json.dumps(arguments, ensure_ascii=False, separators=separators))
    return written


@pytest.mark.parametrize("name", sorted(WRITTEN))
@given(content=TEXTS, calls=CALLS, data=st.data())
def test_calls_that_are_written_anew_continue_the_record(name, content, calls, data):
    """Other spaces and another order of keys and calls are the same turn, whether its calls were fields or text."""
    anew = [(each, dict(data.draw(st.permutations(list(values.items()))))) for each, values in calls]
    anew = data.draw(st.permutations(anew)) if len(anew) > 1 else anew
    echo = text(write(name, content.strip(), anew, ("  ,", ":")) + data.draw(st.sampled_from(["", "\n", " \n"])))
    turns = [text(write(name, content, calls)), listed(calls, content)]
    if name in ("glm45", "qwen3_coder"):
        del turns[1]  # without a schema, the values in the text are strings

    for turn in turns:
        tree, _ = grow(turn, parser_of(name))
        assert continues(tree, echo)[0], (turn, echo)


@pytest.mark.parametrize("name", sorted(WRITTEN))
@given(content=TEXTS, calls=CALLS, change=st.sampled_from(["value", "name", "fewer", "more", "text"]))
def test_other_calls_fork(name, content, calls, change):
    """Another value, another name, a call fewer or more, or another text is not the turn of the model."""
    others = [(each, dict(values)) for each, values in calls]
    if change == "value":
        others[-1][1]["a"] = "another"
    elif change == "name":
        others[-1] = ("subtract", others[-1][1])
    elif change == "fewer":
        assume(len(others) > 1)
        others.pop()
    elif change == "more":
        others.append(("add", {"a": 5}))
    shown = "Something else.\n" if change == "text" else content
    tree, _ = grow(text(write(name, content, calls)), parser_of(name))

    assert not continues(tree, text(write(name, shown, others)))[0]


@given(content=TEXTS, calls=CALLS, data=st.data())
def test_calls_in_fields_have_an_order(content, calls, data):
    """Results may have no ids in the template, and would stand beside other calls than the model has made."""
    turn = listed(calls, content)
    items = data.draw(st.permutations(turn["tool_calls"]))
    tree, _ = grow(turn, parser_of("hermes"))

    echo = {**turn, "tool_calls": items}
    assert continues(tree, echo)[0] is (normalise(turn).calls == normalise(echo).calls)


def test_qwen_agent_writes_calls_with_the_spaces_of_python():
    """Its default mode has no tools in the request; it takes the calls out of the text and writes them anew."""
    turn = 'I look.\n<tool_call>\n{"name":  "lookup", "arguments":  {"n":  1.0,"city":  "Zürich"}}\n</tool_call>'
    echo = 'I look.\n<tool_call>\n{"name": "lookup", "arguments": {"n": 1.0, "city": "Zürich"}}\n</tool_call>'
    tree, _ = grow(text(turn), parser_of("hermes"))

    assert (True, {"calls_as_text": 1}) == continues(tree, text(echo))


@pytest.mark.parametrize("parser", [parser_of("hermes"), ProbeParser(probe_chat())], ids=["hermes", "probe"])
def test_the_parser_is_asked_for_changed_texts_alone(parser):
    """An exact echo, one with a known tolerance and one seen before cost no parsing; any parser can be asked."""
    turn = '<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>'
    tree, reader = grow(text(turn), parser)

    assert continues(tree, text(turn))[0]
    assert continues(tree, text(f"\n{turn} "))[0]
    assert 0 == reader.number
    assert continues(tree, text(turn.replace("  ", " ")))[0]
    assert 2 == reader.number, "the echo and the turn itself"
    assert continues(tree, text(turn.replace("  ", " ")))[0]
    assert 2 == reader.number
    assert not continues(tree, text(turn.replace("  1", "2")))[0]
    assert 3 == reader.number, "the turn is read once"


def test_malformed_and_missing_calls_are_compared_as_text():
    """A call that cannot be read, a text without calls and somebody else's message are no call that is written anew."""
    broken = '<tool_call>\n{"name": "add", "arguments": {"a":  1}\n</tool_call>'
    tree, _ = grow(text(broken), parser_of("hermes"))
    assert continues(tree, text(broken))[0]
    assert not continues(tree, text(broken.replace("  ", " ")))[0]

    tree, _ = grow(text("Yes  or no."), parser_of("hermes"))
    assert not continues(tree, text("Yes or no."))[0]

    call = '<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>'
    tree, reader = grow(text(call), parser_of("hermes"))
    assert not continues(tree, {"role": "user", "content": call.replace("  ", " ")})[0]
    assert 0 == reader.number


@pytest.mark.parametrize("size", [1 << 21])
def test_very_long_texts_are_not_parsed(size):
    """A text of megabytes would hold up the other sessions."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a":  "' + "x" * size + '"}}\n</tool_call>'
    tree, _ = grow(text(call), parser_of("hermes"))

    assert not continues(tree, text(call.replace("  ", " ")))[0]
