"""Properties of every format: rendered calls are read back, and any text can be parsed in linear time."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_turns import CONTENTS, XML, calls_of

from turnwise import ToolCall
from turnwise_tool_formats.turn import Turn


@pytest.mark.many_cases
@given(st.data())
def test_calls_survive_a_round_trip(turn, render, parser_for, resources_of, data):
    """Names, arguments and their order are kept, whatever the texts in them hold; the rest is the content."""
    calls = data.draw(calls_of(turn))
    content = data.draw(CONTENTS)
    text = render(turn, content, calls)

    found, parsed = parser_for(turn, resources_of(*calls)).parse_text(text)

    assert [""] * len(calls) == [call.error for call in parsed]
    assert calls == [(call.name, call.arguments) for call in parsed]
    assert content.strip() == found.strip()
    assert all(call.raw and call.raw in text for call in parsed)


@given(st.data())
def test_tags_of_other_calls_inside_texts_are_text(turn, render, parser_for, resources_of, data):
    """In the formats with JSON or Python values, a text may hold whole calls of the same format."""
    if turn in XML:
        pytest.skip("XML formats cannot write their tags as text")
    inner = render(turn, "", [("inner", {"a": 1})])
    calls = [("outer", {"text": data.draw(st.text(max_size=5)) + inner, "more": [inner, {"deep": inner}]}), ("b", {})]

    _content, parsed = parser_for(turn, resources_of(*calls)).parse_text(render(turn, "", calls))

    assert calls == [(call.name, call.arguments) for call in parsed]


@settings(max_examples=10)
@given(st.data())
def test_tokenization_changes_nothing(turn, render, parser_for, resources_of, chat, data):
    """A tag may be one id or several."""
    calls = data.draw(calls_of(turn))
    text = render(turn, "Now: ", calls)
    parser = parser_for(turn, resources_of(*calls))
    whole = chat.tokenizer.encode(text)
    by_character = [token_id for char in text for token_id in chat.tokenizer.encode(char)]

    assert parser.parse_text(text) == parser.parse(np.array(whole, np.int32))
    assert parser.parse_text(text) == parser.parse(np.array([*by_character, chat.stop_token_ids[0]], np.int32))


PIECES = [
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=p>", "</parameter>", "<think>",
    "</think>", "<arg_key>k</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<|python_tag|>",
    "<|python_start|>", "<|python_end|>", "f(a=", "f(", ")", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
    "function<｜tool▁sep｜>f", "\n```json\n", "```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|start|>assistant", "<|channel|>commentary", " to=f", "<|constrain|>json", "<|message|>",
    "<|call|>", "<|end|>", "<|tool_call|>", "functools", "<|/tool_call|>", "<function_call>", '{"name": "f", ',
    '"arguments": ', '"parameters": ', "{}", "{", "}", "[", "]", '"', "'", '"""', ",", ";", ":", "\\", "\\ud8", "1e9",
    "f", " ", "\n",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=25).map("".join))
def test_any_text_can_be_parsed(turn, parser_for, text):
    """Nothing is raised, content and calls are parts of the text, and the arguments of good calls are JSON."""
    content, calls = parser_for(turn).parse_text(text)

    assert len(content) + sum(len(call.raw) for call in calls) <= len(text)
    for call in calls:
        assert isinstance(call, ToolCall)
        assert call.raw in text
        assert bool(call.error) or call.name
        assert json.loads(json.dumps(call.arguments, allow_nan=False)) == call.arguments
        json.dumps(call.arguments, ensure_ascii=False).encode()


@pytest.mark.many_cases
@pytest.mark.parametrize("unit", [(a, b) for a in PIECES for b in ("", '["', "{", '{"a": "', 'f(a="""', "\n", "x")])
def test_work_is_linear_in_the_text(parser_for, monkeypatch, unit):
    """However a long turn repeats itself, searches and values read at most 45 times its characters."""
    text = "".join(unit) * (20_000 // len("".join(unit)))
    work = 0
    real = {name: getattr(Turn, name) for name in ("search", "read_value")}

    def search(turn, pattern, start):
        nonlocal work
        match = real["search"](turn, pattern, start)
        work += (match.end() if match else len(turn.text)) - start
        return match

    def read_value(turn, read, start):
        def count(source, at):
            nonlocal work
            try:
                value, stop = read(source, at)
            except ValueError:
                work += len(source) - at  # at most: a failed attempt may read to the end
                raise
            work += stop - at
            return value, stop

        return real["read_value"](turn, count, start)

    monkeypatch.setattr(Turn, "search", search)
    monkeypatch.setattr(Turn, "read_value", read_value)
    for name in ("hermes", "llama3_json", "llama4_pythonic", "qwen3_coder", "mistral", "deepseek_v3", "glm45",
                 "kimi_k2", "gpt_oss", "granite", "phi4"):  # fmt: skip
        work = 0
        parser_for(name).parse_text(text)
        assert work <= 45 * len(text), name
