"""Turns that a grammar of calls allows, sampled at random: the parser of each format reads them as valid calls."""

import json
import math
import random
import re

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from session_scenarios import make_call, user

from turnwise import Resources
from turnwise.plugin.registry import Registry
from turnwise_chat_templates.template import ChatTemplate
from turnwise_gateway.calls import CallRefusedError, Constraint
from turnwise_gateway.session.grammars import GrammarWriter
from turnwise_hermes_parser import register_tool_parsers as register_hermes
from turnwise_testing.inputs.schemas import random_schema
from turnwise_tiny_models.tokenizer import byte_level_tokenizer
from turnwise_tool_parsers import register_tool_parsers

# A format, and the tokens that its models add to their vocabulary.
FORMATS = {
    "hermes": ("hermes", ("<tool_call>", "</tool_call>")),
    "llama3_json": ("llama3_json", ("<|python_tag|>",)),
    "mistral": ("mistral", ("[TOOL_CALLS]",)),
    "mistral_args": ("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    "deepseek_v3": (
        "deepseek_v3",
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
    ),
    "kimi_k2": (
        "kimi_k2",
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
    ),
    "granite": ("granite", ("<|tool_call|>",)),
    "granite4": ("granite", ("<tool_call>", "</tool_call>")),
    "phi4": ("phi4", ("<|tool_call|>", "<|/tool_call|>")),
}
MAX_TOKENS = 600
PARAM = {"param": "tool_choice"}


class Setting:
    """A format with its tags as tokens or as text: chat, parser, writer, and the tokenizer of the grammars."""

    def __init__(self, name, has_tags):
        form, tags = FORMATS[name]
        self.chat = ChatTemplate(byte_level_tokenizer(["{}"], 300, tags=tags if has_tags else ()), name="chatml")
        registry = Registry("tool parser")
        register_hermes(registry)
        register_tool_parsers(registry)
        entry = registry.get(form)
        self.parser = entry.factory(entry.config(), Resources(chat=self.chat))
        self.writer = GrammarWriter(self.chat, self.parser, None)
        self.lexicon = from_tokenizer(self.chat.tokenizer._tokenizer)

    def sample(self, grammar, seed):
        """Return the ids of a random turn that the grammar allows; None if it has not ended after some tokens."""
        matcher, choose, ids = LLMatcher(self.lexicon, grammar), random.Random(seed), []
        assert not matcher.is_error(), matcher.get_error()
        while not (matcher.is_stopped() or (matcher.is_accepting() and choose.random() < 0.3)):
            if len(ids) == MAX_TOKENS:
                return None
            allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), np.uint8))
            ids.append(int(choose.choice([each for each in allowed if each not in self.lexicon.eos_tokens])))
            assert matcher.consume_token(ids[-1])
        return ids


def tool(name, schema):
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.fixture(params=[(name, tags) for name in FORMATS for tags in (True, False)], ids=str, scope="module")
def format_setting(request):
    """Each format, with its tags as tokens and as text."""
    return Setting(*request.param)


@pytest.mark.many_cases
@settings(max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_a_turn_with_a_named_tool_is_its_valid_call(format_setting, seed):
    """Exactly one call, of this tool, whose arguments fit, and no other text."""
    schema = random_schema(seed)
    tools = [tool("find_it", {"properties": {}}), tool("save", schema)]
    call = make_call(user("Go."), tools=tools, constraints=(Constraint(kind="named", tools=("save",), **PARAM),))

    ids = format_setting.sample(format_setting.writer.write(call), seed)

    if ids is not None:
        text, calls = format_setting.parser.parse_for(np.array(ids, np.int32), tools)
        (read,) = calls
        assert text.strip() == ""
        if read.error:  # a random number in JSON now and then is larger than any float
            assert re.search(r": the number \S{2,43} is too large\. ", read.error)
            assert read.name in {"save", ""}  # the name may be in the same JSON
        else:
            assert read.name == "save"
            jsonschema.validate(dict(read.arguments), {"type": "object", **schema})


@pytest.mark.many_cases(24)
@pytest.mark.parametrize("number", ["8E935566767", "-1e309", f"{'9' * 400}.5", "8e-935566767", "1e308", "9" * 400])
def test_a_number_of_any_size_is_allowed_and_read_or_named(format_setting, number):
    """No grammar bounds numbers. One that no float can hold makes the call malformed, and its text stays as it is."""
    tools = [tool("save", {"properties": {"n": {"type": "number"}}})]
    call = make_call(user("Go."), tools=tools, constraints=(Constraint(kind="named", tools=("save",), **PARAM),))
    frame = format_setting.parser.frame("save")
    ids = format_setting.chat.tokenizer.encode(frame.example().replace("{}", f'{{"n": {number}}}'))

    assert LLMatcher(format_setting.lexicon, format_setting.writer.write(call)).try_consume_tokens(ids) == len(ids)

    _text, (read,) = format_setting.parser.parse_for(np.array(ids, np.int32), tools)
    if math.isfinite(float(number)) or number.isdigit():
        assert ("", {"n": json.loads(number)}) == (read.error, read.arguments)
    else:
        assert "is too large" in read.error
        assert number in read.raw


@pytest.mark.many_cases
@settings(max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_a_turn_with_required_calls_has_calls_alone(format_setting, seed):
    """One or several, of any tool, whose arguments fit, and no other text."""
    schemas = {"save": {"properties": {"n": {"enum": [1, "<b>"]}}, "required": ["n"]}, "find-it": {"properties": {}}}
    for schema in schemas.values():
        schema["additionalProperties"] = False
    tools = [tool(name, schema) for name, schema in schemas.items()]
    call = make_call(user("Go."), tools=tools, constraints=(Constraint(kind="required", **PARAM),))

    ids = format_setting.sample(format_setting.writer.write(call), seed)

    if ids is not None:
        text, calls = format_setting.parser.parse_for(np.array(ids, np.int32), tools)
        assert "" == text.strip(" \n\r\t;,")
        assert calls
        for each in calls:
            assert "" == each.error
            jsonschema.validate(dict(each.arguments), schemas[each.name])


@pytest.mark.many_cases
@settings(max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_a_turn_that_may_answer_has_only_allowed_calls(format_setting, seed):
    """A text without a call, or calls of the allowed tool."""
    tools = [tool("save", {"properties": {}, "additionalProperties": False}), tool("find", {"properties": {}})]
    allowed = Constraint(kind="allowed", tools=("save",), may_answer=True, **PARAM)
    call = make_call(user("Go."), tools=tools, constraints=(allowed,))

    ids = format_setting.sample(format_setting.writer.write(call), seed)

    if ids is not None:
        _text, calls = format_setting.parser.parse_for(np.array(ids, np.int32), tools)
        assert {("save", "")} >= {(each.name, each.error) for each in calls}


def test_a_written_call_of_each_format_is_allowed(format_setting):
    """The forms are those of the models: see the renderers of the parsers' own tests."""
    frame = format_setting.parser.frame("save") if hasattr(format_setting.parser, "frame") else None
    assert frame is not None
    tools = [tool("save", {"properties": {}})]
    grammar = format_setting.writer.write(
        make_call(user("Go."), tools=tools, constraints=(Constraint(kind="named", tools=("save",), **PARAM),))
    )
    matcher = LLMatcher(format_setting.lexicon, grammar)
    ids = format_setting.chat.tokenizer.encode(frame.example())

    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()


@pytest.mark.parametrize(("name", "tool_name"), [("deepseek_v3", "a{b"), ("kimi_k2", "a b"), ("mistral_args", "a[b")])
def test_a_name_that_does_not_fit_is_refused(name, tool_name):
    """The parser would not read its calls."""
    call = make_call(user("Go."), tools=[tool(tool_name, {})], constraints=(Constraint(kind="required", **PARAM),))

    with pytest.raises(CallRefusedError, match="has no grammar"):
        Setting(name, has_tags=True).writer.write(call)


def test_frames_are_json():
    """The example of a frame in a list is a list of JSON objects."""
    frame = Setting("phi4", has_tags=True).parser.frame('a "b"')

    assert [{"name": 'a "b"', "arguments": {}}] == json.loads(
        frame.example()[len("<|tool_call|>") : -len("<|/tool_call|>")]
    )
