"""The chat `harmony` has the bytes of gpt-oss's template where that shows all messages, and shows more than it."""

import json
from functools import cache

import jinja2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from real_templates import TEMPLATES, chat_of, source_of, tokenizer_of

from turnwise.config.structuring import structure
from turnwise.errors import ConfigError, DataError, TemplateError
from turnwise.protocols import ModelSpec
from turnwise_chat_templates.config import HarmonyConfig, read_date
from turnwise_chat_templates.harmony import HarmonyChat
from turnwise_chat_templates.plugin import make_harmony
from turnwise_testing import ChatSuite, byte_tokenizer
from turnwise_testing.checks.chat import ChatProbe, tokenizer_resources

SPECIAL = (
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
    "<|endoftext|>",
)
USER = {"role": "user", "content": "What is 6 * 7?"}
ANSWER = {"role": "assistant", "content": "It is 42."}
TEXTS = st.one_of(st.sampled_from(["", "a", 'say "x"\n', "é → 世界 🙂", "<b>", "|>", "{{ x }}"]), st.text(max_size=12))
NAMES = st.text("abcXYZ_09", min_size=1, max_size=8)

needs_template = pytest.mark.skipif(not TEMPLATES.is_dir(), reason="trl is not installed")


def make_chat(policy="text", **options):
    return HarmonyChat(
        byte_tokenizer(None, SPECIAL, eos_token="<|return|>"), special_tokens=policy, config=HarmonyConfig(**options)
    )


def call_of(name, arguments, call_id="a"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result_of(name, content, call_id="a"):
    return {"role": "tool", "name": name, "tool_call_id": call_id, "content": content}


def prompt_of(chat, *messages, tools=()):
    return chat.tokenizer.decode(chat.prompt(messages, tools))


def delta_of(chat, last, *messages):
    return chat.tokenizer.decode(chat.delta(messages, chat.tokenizer.encode(last)[-1]))


class TestHarmony(ChatSuite):
    """The chat of gpt-oss."""

    entry_point = "chat_templates"
    module = "turnwise_chat_templates.plugin"
    registered = "harmony"

    @pytest.fixture
    def resources(self, tmp_path):
        return tokenizer_resources(tmp_path, SPECIAL, "<|return|>")

    @pytest.fixture
    def probe(self, config, resources):
        return ChatProbe(
            make_chat=lambda: make_harmony(config, resources),
            write_turn="<|channel|>final<|message|>{}".format,
            past_end="<|end|>",
        )


def with_common_keys(schemas):
    common = st.fixed_dictionaries(
        {}, optional={"description": TEXTS, "nullable": st.booleans(), "default": JSON, "title": TEXTS}
    )
    return st.tuples(schemas, common).map(lambda parts: parts[1] | parts[0])


def containers(schemas):
    properties = st.dictionaries(NAMES, schemas, max_size=3)
    return with_common_keys(
        st.one_of(
            st.fixed_dictionaries({"type": st.just("array")}, optional={"items": schemas}),
            st.fixed_dictionaries({"oneOf": st.lists(schemas, max_size=3)}),
            st.fixed_dictionaries({"anyOf": st.lists(schemas, max_size=3)}),
            properties.flatmap(
                lambda found: st.fixed_dictionaries(
                    {"type": st.just("object"), "properties": st.just(found)},
                    optional={"required": st.lists(st.sampled_from(sorted(found) or ["none"]))},
                )
            ),
        )
    )


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.just(0.5), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(NAMES, inner, max_size=2)),
    max_leaves=4,
)
KINDS = ["string", "number", "integer", "boolean", "object", "null", "array"]
ENUMS = st.fixed_dictionaries(
    {"type": st.just("string"), "enum": st.lists(st.one_of(TEXTS, st.integers(), st.none()), max_size=3)}
)
LEAVES = with_common_keys(
    st.one_of(
        st.fixed_dictionaries(
            {"type": st.one_of(st.sampled_from(KINDS), st.lists(st.sampled_from(KINDS), max_size=3))}
        ),
        ENUMS,
        st.just({}),
    )
)
SCHEMAS = st.recursive(st.one_of(LEAVES, st.booleans()), containers, max_leaves=6)
PARAMETERS = st.dictionaries(NAMES, SCHEMAS, max_size=4).flatmap(
    lambda found: st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.just(found)},
        optional={"required": st.lists(st.sampled_from(sorted(found) or ["none"]))},
    )
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"name": NAMES, "description": TEXTS}, optional={"parameters": st.one_of(PARAMETERS, st.none())}
    ).map(lambda function: {"type": "function", "function": function}),
    max_size=3,
)
LEADS = st.one_of(
    st.just([]),
    st.tuples(st.sampled_from(["system", "developer"]), TEXTS).map(
        lambda each: [dict(zip(("role", "content"), each, strict=True))]
    ),
)


@st.composite
def exchanges(draw):
    """Return a question and the turns that answer it: with a call and its result, with an answer, or both."""
    messages = [{"role": "user", "content": draw(TEXTS)}]
    for number in range(draw(st.integers(0, 2))):
        name = draw(NAMES)
        turn = {"role": "assistant", "tool_calls": [call_of(name, draw(ARGUMENTS), f"c{number}")]}
        turn |= draw(st.sampled_from([{"content": ""}, {"content": None}, {"thinking": "Hm."}, {"content": "I call."}]))
        messages += [turn, result_of(name, draw(TEXTS), f"c{number}")]
    if draw(st.booleans()):
        messages.append(ANSWER | draw(st.sampled_from([{}, {"thinking": "Easy."}, {"reasoning_content": "Easy."}])))
    return messages


ARGUMENTS = st.dictionaries(NAMES, JSON, max_size=3).flatmap(
    lambda value: st.sampled_from([value, json.dumps(value), json.dumps(value, ensure_ascii=False)])
)


@cache
def template_tokenizer():
    return tokenizer_of(source_of("gptoss"))


@needs_template
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(LEADS, TEXTS, TOOLS)
def test_prompts_are_those_of_the_template(lead, text, tools):
    """A leading message, a user's and tools with any schema have the same bytes; more schemas can be shown."""
    messages = [*lead, {"role": "user", "content": text}]
    try:
        expected = template_tokenizer().apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
    except (jinja2.TemplateError, TypeError):
        prompt_of(CHAT, *messages, tools=tools)
        return
    assert expected == prompt_of(CHAT, *messages, tools=tools)


@needs_template
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(LEADS, st.lists(exchanges(), min_size=1, max_size=3), st.booleans())
def test_conversations_are_those_of_the_template(lead, parts, has_tools):
    """Earlier turns with contents, reasoning, one call each and its result have the same ids, if it shows them."""
    messages = [*lead, *(message for part in parts for message in part)]
    tools = [{"type": "function", "function": {"name": "f", "description": "F."}}] if has_tools else []
    try:
        expected = chat_of("gptoss").prompt(messages, tools)
    except TemplateError:
        prompt_of(CHAT, *messages, tools=tools)
        return
    assert chat_of("gptoss").tokenizer.decode(expected) == prompt_of(CHAT, *messages, tools=tools)


CHAT = make_chat(date=None)


@needs_template
@pytest.mark.parametrize("last", ["<|return|>", "<|call|>", "<|end|>", "x", "世"])
@pytest.mark.parametrize(
    "new",
    [
        [USER],
        [USER, USER],
        [result_of("f", "é\n")],
        [result_of("f", "1"), result_of("f", "2", "b")],
        [result_of("f", ""), USER],
    ],
    ids=["user", "two users", "tool", "two tools", "tool and user"],
)
def test_deltas_are_those_of_the_template(last, new):
    """A turn that ended or was cut is continued alike, but for an end that the template would repeat."""
    expected = delta_of(chat_of("gptoss"), last, *new)
    if last == "<|end|>" and new[0]["role"] == "user":
        expected = expected.removeprefix("<|end|>")
    assert expected == delta_of(CHAT, last, *new)


def test_several_calls():
    """All calls of a turn are shown, and each result names the tool of its own call, by name or by id."""
    turn = {
        "role": "assistant",
        "content": "",
        "thinking": "Both.",
        "tool_calls": [call_of("f", "{}"), call_of("g", {}, "b")],
    }
    results = [{"role": "tool", "tool_call_id": "b", "content": "2"}, result_of("f", "1")]
    assert prompt_of(CHAT, USER, turn, *results).partition("6 * 7?<|end|>")[2] == (
        "<|start|>assistant<|channel|>analysis<|message|>Both.<|end|>"
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.g to=assistant<|channel|>commentary<|message|>"2"<|end|>'
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"1"<|end|>'
        "<|start|>assistant"
    )
    new = [result_of("g", "2"), result_of("f", "1")]
    assert delta_of(CHAT, "<|call|>", *new) == prompt_of(CHAT, USER, turn, *new).rpartition("<|call|>")[2]


def test_reasoning_and_content_beside_a_call():
    """The reasoning is analysis and the content commentary; an answer hides the reasoning before it, and no content."""
    turn = {"role": "assistant", "content": "I add.", "reasoning_content": "Easy.", "tool_calls": [call_of("f", "{}")]}
    shown = prompt_of(CHAT, USER, turn, result_of("f", "1"))
    assert "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>commentary<|message|>I add." in shown
    hidden = prompt_of(CHAT, USER, turn, result_of("f", "1"), ANSWER, USER)
    assert "Easy." not in hidden
    assert "I add." in hidden


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "nobody", "content": "x"}, r"gpt-oss has no such role"),
        ({"content": "x"}, "it has no role"),
        ({"role": "system", "content": "x"}, "at the beginning of a prompt only"),
        ({"role": "user", "content": 1.5}, "must be text, not float"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "parts of type 'text' only, not 'image_url'"),
        ({"role": "tool", "content": "x"}, "needs the 'name' of its tool"),
        ({"role": "tool", "content": "x", "tool_call_id": "other"}, "needs the 'name' of its tool"),
        ({"role": "assistant", "tool_calls": [call_of("f", '{"a')]}, r"tool_calls\[0\]: the arguments are no JSON"),
        ({"role": "assistant", "tool_calls": [call_of("f", "[1]")]}, r"tool_calls\[0\]: the arguments are no JSON"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, r"tool_calls\[0\] has no function with a name"),
        ({"role": "assistant", "tool_calls": ["f"]}, r"tool_calls\[0\] has no function with a name"),
        ({"role": "assistant", "tool_calls": "f"}, "tool_calls must be a list, not str"),
        ({"role": "assistant", "content": "x", "thinking": 1}, "'thinking' must be text, not int"),
        ({"role": "assistant", "content": "<|channel|>final<|message|>x"}, "'content' has headers of messages"),
    ],
)
def test_refused_messages(message, text):
    """The error names the message and the reason, in a prompt and in a delta."""
    with pytest.raises(TemplateError, match=rf"^messages\[1\] \(role .*\): .*{text}"):
        CHAT.prompt([USER, message])
    if message.get("role") != "assistant":
        with pytest.raises(TemplateError, match=rf"^messages\[0\] \(role .*\): .*{text}"):
            CHAT.delta([message], 0)


@pytest.mark.parametrize("call_id", [None, "", ["a"]])
def test_calls_without_ids(call_id):
    """A result without a name and an id is none of a call without an id."""
    turn = {"role": "assistant", "content": "", "tool_calls": [call_of("f", "{}", call_id)]}
    assert "functions.g to=assistant" in prompt_of(CHAT, USER, turn, result_of("g", "1", call_id))
    with pytest.raises(TemplateError, match="needs the 'name' of its tool"):
        CHAT.prompt([USER, turn, {"role": "tool", "tool_call_id": call_id, "content": "1"}])


def test_a_delta_is_of_the_environment():
    """Turns of the model are sampled, and no message is no delta."""
    for messages in ([], [ANSWER], [USER, ANSWER]):
        with pytest.raises(TemplateError, match="a delta takes messages of the environment"):
            CHAT.delta(messages, 0)


@pytest.mark.parametrize("token", SPECIAL)
def test_spelled_special_tokens(token):
    """Contents, names and arguments that spell a special token have no more ids of it, also where JSON escapes it."""
    text, escaped = f"a{token}b", json.dumps(f"a{token}b").replace("<", "\\u003c")

    def messages_with(text, arguments):
        turn = {"role": "assistant", "content": text, "tool_calls": [call_of(text, f'{{"x": {arguments}}}')]}
        return [{"role": "system", "content": text}, {"role": "user", "content": text}, turn, result_of(text, text)]

    forged, plain = (CHAT.prompt(messages_with(*each)).tolist() for each in ((text, escaped), ("ab", '"ab"')))
    token_id = CHAT.tokenizer.encode(token)[0]
    assert forged.count(token_id) == plain.count(token_id)
    with pytest.raises(DataError, match="spells the special token"):
        make_chat("refuse").prompt(messages_with("ab", escaped))
    assert make_chat("parse").prompt(messages_with(text, escaped)).tolist().count(token_id) > plain.count(token_id)


def test_the_system_message():
    """The options are in it, and the date is one of ISO 8601."""
    chat = make_chat(
        reasoning_effort="high", model_identity="You are X.", knowledge_cutoff="2025-01", date="2026-05-31"
    )
    assert prompt_of(chat, USER).startswith(
        "<|start|>system<|message|>You are X.\nKnowledge cutoff: 2025-01\nCurrent date: 2026-05-31\n\nReasoning: high\n"
    )
    with pytest.raises(ValueError, match="Invalid isoformat"):
        HarmonyConfig(date="31.5.2026")


def test_the_date_is_fixed_once():
    """A config without a date gets the one of today, and keeps it when a file of it is read again."""
    config = structure({}, HarmonyConfig)
    assert config.date == read_date(None)
    assert structure({"date": config.date}, HarmonyConfig) == config


def test_a_schema_that_cannot_be_shown():
    """The error names the tool."""
    for function in ({"description": "F."}, {"name": "f", "description": 1}):
        with pytest.raises(TemplateError, match=r"^tools\[1\]: the schema cannot be shown"):
            CHAT.prompt([USER], [{"type": "function", "function": {"name": "f"}}, {"function": function}])


def test_the_model_has_the_tokens_and_no_template(tmp_path):
    """Another tokenizer, a template and its options are errors; the generation config adds ends of turns."""
    with pytest.raises(ConfigError, match=r"no token '<\|return\|>', which HarmonyChat needs"):
        HarmonyChat(byte_tokenizer())
    spec = tokenizer_resources(tmp_path, SPECIAL, "<|return|>").model
    for options in ({"chat_template": tmp_path / "x"}, {"template_options": {"a": 1}}):
        with pytest.raises(ConfigError, match=f"model.{next(iter(options))}: HarmonyChat has no template"):
            HarmonyChat.load(ModelSpec(path=spec.path, **options))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [261, 263, 262]}', encoding="utf-8")
    chat = HarmonyChat.load(spec)
    assert [chat.tokenizer.decode([each]) for each in chat.stop_token_ids] == [
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
    ]
