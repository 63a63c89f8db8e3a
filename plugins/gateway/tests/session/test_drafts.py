"""The parts of a turn that is being sampled are the start of its reply, wherever the engine cuts it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_scenarios import ADD, make_call, user

from turnwise import FinishReason, GenerateResult, Registry, Resources
from turnwise_chat_templates.template import ChatTemplate
from turnwise_gateway.session.texts import build_calls
from turnwise_gateway.session.turns import TurnReader
from turnwise_hermes_parser import register_tool_parsers as register_hermes
from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_testing.probes.agent import ProbeParser
from turnwise_tool_parsers import register_tool_parsers
from turnwise_tool_parsers.formats import FORMATS
from turnwise_tool_parsers.harmony import HarmonyReasoning
from turnwise_tool_parsers.think_tags import ThinkTags, ThinkTagsConfig

CHAT = ChatTemplate(byte_tokenizer())
TAGS = ThinkTags(ThinkTagsConfig())
PIECES = [
    "I add. ", "Grüße, 世界 🌍", "<think>", "</think>", "</thi", "\n", " ", "END", "EN", "<tool_call>", "</tool_call>",
    '{"name": "add", "arguments": {"a": 1}}', '{"name": "add", "parameters": {"a": 1}}', "<tool_c", "<|python_tag|>",
    "[add(a=1)]", "<|python_start|>", "<|python_end|>", "<function=add>", "<parameter=a>1</parameter>", "</function>",
    "[TOOL_CALLS]", "add[ARGS]", '[{"name": "add", "arguments": {}}]', "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "add<｜tool▁sep｜>{}", "<｜tool▁call▁end｜>", "<arg_key>a</arg_key>", "<arg_value>1</arg_value>",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>",
    "<|channel|>commentary", " to=functions.add", "<|message|>", "{}", "<|call|>", "<|tool_call|>", "functools", "[",
    "{", "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=10).map("".join)


def parser_of(name):
    registry = Registry("tool parser")
    register_hermes(registry)
    register_tool_parsers(registry)
    entry = registry.get(name)
    return entry.factory(entry.config(), Resources(chat=CHAT))


def name_call(index, _call):
    return f"c{index}"


def result_of(ids, stop):
    return GenerateResult(
        token_ids=np.array(ids, np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        finish_reason=FinishReason.STOP,
        stop_reason=stop,
    )


def parts_of(reader, call, ids, cuts):
    """Return what a stream reads after each cut of a turn."""
    draft = reader.draft(call, call.stop)
    parts, start = [], 0
    for end in (*sorted(cuts), len(ids)):
        draft.text.add(ids[start:end])
        texts, calls = draft.read()
        parts.append((texts.reasoning, texts.content, build_calls(calls, texts.places, name_call)))
        start = max(start, end)
    return parts


@pytest.mark.parametrize("name", ["", *(grammar.name for grammar in FORMATS)])
@given(st.data())
def test_streamed_is_whole(name, data):
    """Text, reasoning, calls of every format, stop strings and characters of several bytes."""
    text, stop = data.draw(TEXTS), data.draw(st.sampled_from([None, "END"]))
    ids = [*CHAT.tokenizer.encode(text), *data.draw(st.sampled_from([(), CHAT.stop_token_ids[:1]]))]
    reasoning = data.draw(st.sampled_from([None, TAGS, HarmonyReasoning()]))
    reader = TurnReader(
        chat=CHAT,
        parser=parser_of(name) if name else None,
        split=reasoning.split if reasoning else None,
        settle=reasoning.settled if reasoning else None,
        keeps_malformed=data.draw(st.booleans()),
    )
    call = make_call(user("Add."), stop=("END",) if stop else (), tools=data.draw(st.sampled_from([(), (ADD,)])))

    parts = parts_of(reader, call, ids, data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    read = reader.read(result_of(ids, stop if stop and stop in text else None), call, name_call)

    whole = (read.reasoning, read.content, read.tool_calls)
    for before, after in zip(parts, [*parts[1:], whole], strict=True):
        assert [True, True] == [text.startswith(known) for text, known in zip(after[:2], before[:2], strict=True)]
        assert_continue(before[2], after[2])


def assert_continue(before, after):
    """Check that the calls of a stream begin its next ones."""
    assert len(before) <= len(after)
    for earlier, later in zip(before, after, strict=False):
        assert (earlier.id, earlier.name, earlier.place) == (later.id, later.name, later.place)
        assert later.arguments.startswith(earlier.arguments)
        assert earlier.is_open or earlier == later


def test_plain_text_comes_at_once():
    """Each part of a text is shown with the token that ends it; half a character waits for the other half."""
    reader = TurnReader(chat=CHAT, parser=parser_of("hermes"))
    text = "Grüße, 世界"
    ids = CHAT.tokenizer.encode(text)

    contents = [content for _, content, _ in parts_of(reader, make_call(user("Hi.")), ids, range(len(ids)))]

    assert [text[:size] for size in range(len(text) + 1)] == list(dict.fromkeys(contents))


def test_reasoning_comes_at_once_and_calls_at_the_end():
    """The text around a call is held back with it, since a malformed one would be text."""
    text = '<think>I add.</think>So: <tool_call>{"name": "add", "arguments": {}}</tool_call> Done.'
    reader = TurnReader(chat=CHAT, parser=parser_of("hermes"), split=TAGS.split, settle=TAGS.settled)
    ids = CHAT.tokenizer.encode(text)

    parts = dict.fromkeys(parts_of(reader, make_call(user("Hi.")), ids, range(len(ids))))

    assert ("I add", "", ()) in parts
    assert ("I add.", "So: ", ()) == list(parts)[-1]


@pytest.mark.parametrize("options", [{"parser": ProbeParser(CHAT)}, {"split": lambda text: ("", text)}])
def test_parsers_that_cannot_tell_what_is_decided_stream_nothing(options):
    """Their turns are sent when they are whole; a call without tools needs no parser."""
    reader = TurnReader(chat=CHAT, **options)

    assert reader.draft(make_call(user("Hi.")), ()) is None
    assert (reader.draft(make_call(user("Hi."), tools=()), ()) is None) == ("split" in options)


def test_a_growing_call_costs_no_look_at_the_text_before_it():
    """The reasoning is split once for each call, however many parts its arguments have."""
    splits = []

    def split(text):
        splits.append(text)
        return TAGS.split(text)

    reader = TurnReader(chat=CHAT, parser=parser_of("hermes"), split=split, settle=TAGS.settled, keeps_malformed=True)
    call_text = '<tool_call>{"name": "add", "arguments": {"a": "' + "x" * 500 + '"}}</tool_call>'
    text = f"<think>I add.</think>So: {call_text} {call_text}"
    ids = CHAT.tokenizer.encode(text)

    parts = parts_of(reader, make_call(user("Hi.")), ids, range(len(ids)))

    assert ["<think>I add.</think>So: ", "<think>I add.</think>So: ", " "] == splits
    assert len({part[2] for part in parts}) > 1000


def test_calls_come_with_the_log_probabilities_at_the_end():
    """A request for log-probabilities has them for the whole turn, and its calls behind them."""
    reader = TurnReader(chat=CHAT, parser=parser_of("hermes"), keeps_malformed=True)
    ids = CHAT.tokenizer.encode('<tool_call>{"name": "add", "arguments": {}}</tool_call>')

    for logprobs in (False, True):
        parts = parts_of(reader, make_call(user("Hi."), logprobs=logprobs), ids, range(len(ids)))
        assert bool(parts[-1][2]) is not logprobs
