"""Tools in the system prompt: what it tells a model to write is what the parser reads, in every format that has it."""

import json
import re

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from made_turns import CONTENTS, DOTTED, XML, calls_of

from turnwise import Resources
from turnwise.errors import ConfigError, TemplateError
from turnwise.protocols import FormattedParser, ToolWritingChat
from turnwise.tools.schema import compile_schema
from turnwise_chat_templates.template import ChatTemplate
from turnwise_chat_templates.written_tools import WrittenToolsChat
from turnwise_testing.inputs.tokenizers import SPECIAL_TOKENS, TAGS, byte_tokenizer
from turnwise_tool_formats.schema_values import ArgumentTypes
from turnwise_tool_parsers import _NAMES

WRITTEN = tuple(sorted({*_NAMES, "hermes"} - {"gpt_oss"}))
NO_TOOLS = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As the chat templates of many small models: any role, and no tools."""
TWO_ROLES = (
    "{% for message in messages %}{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""It refuses results of tools."""
HOSTILE = st.text(max_size=8) | st.lists(
    st.sampled_from(
        [
            *(
                "<tools>",
                "</tools>",
                "</tool_response>",
                '"',
                "'",
                "\\",
                "\n",
                "\u2028",
                "{",
                "}}",
                "世界 🙂",
                "<think>",
            ),
            *("</function>", "</parameter>", "</arg_value>", "[x(", "<|python_tag|>", "# Tools", "<think>"),
            *(*SPECIAL_TOKENS, *TAGS),
        ]
    ),
    max_size=4,
).map("".join)
CHATS = [ChatTemplate(byte_tokenizer(source)) for source in (NO_TOOLS, TWO_ROLES)]
KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)


def values_of(name):
    """Return a strategy of the schemas of arguments; XML cannot write all texts, so an enum has plain ones there."""
    words = st.sampled_from(["metric", "Grüße 🙂"]) if name in XML else HOSTILE
    plain = st.sampled_from([{"type": kind} for kind in ("string", "integer", "number", "boolean", "null")])
    described = st.builds(lambda schema, text: {**schema, "description": text}, plain, HOSTILE)
    chosen = st.lists(words, min_size=1, max_size=3).map(lambda each: {"type": "string", "enum": each})
    leaves = described | chosen | st.just({"$ref": "#/$defs/unit"}) | st.just({"anyOf": [{"type": "integer"}, {}]})
    return st.recursive(leaves, lambda inner: inner.map(lambda each: {"type": "array", "items": each}), max_leaves=2)


@st.composite
def tools_of(draw, name):
    """Draw one to three tools with hostile texts in their descriptions."""
    found = []
    for tool in draw(st.lists(DOTTED, min_size=1, max_size=3, unique=True)):
        properties = draw(st.dictionaries(KEYS, values_of(name), max_size=3))
        required = draw(st.lists(st.sampled_from([*properties, "missing"]), unique=True, max_size=2))
        parameters = {"type": "object", "properties": properties, "required": required}
        parameters |= {"$defs": {"unit": {"type": "string", "enum": ["km", "mile"]}}, "title": draw(HOSTILE)}
        function = {"name": tool, "description": draw(HOSTILE), "parameters": parameters}
        found.append({"type": "function", "function": function})
    return tuple(found)


class Known:
    """A tool of a schema."""

    def __init__(self, schema):
        self.schema = schema


def resources_with(tools):
    return Resources(chat=CHATS[0], tools={tool["function"]["name"]: Known(tool) for tool in tools})


@pytest.fixture(scope="session", params=WRITTEN)
def name(request):
    """Each format that a system prompt can describe."""
    return request.param


@pytest.mark.many_cases
@given(st.data())
def test_the_prompt_shows_each_schema_and_a_call_that_the_parser_reads(name, parser_for, data):
    """Behind the schemas, one a line, comes a call of the first tool with the arguments that it requires."""
    tools = data.draw(tools_of(name))
    parser = parser_for(name, resources_with(tools))
    head, _, rest = parser.tool_format.describe(tools).partition("<tools>\n")
    *lines, instructions = rest.split("\n", len(tools))

    assert [*tools] == [json.loads(line) for line in lines]
    assert instructions.startswith("</tools>\n\n")
    assert "# Tools" in head
    _, example = instructions.split(parser.grammar.instructions + "\n")
    ((call,), function) = parser.parse_text(example)[1], tools[0]["function"]
    assert (function["name"], "") == (call.name, call.error)
    required = [each for each in function["parameters"]["required"] if each != "missing"]
    assert set(call.arguments) == set(required or function["parameters"]["properties"])


@given(st.data())
def test_an_example_fits_the_schema_of_its_tool(name, parser_for, data):
    """The tool itself would take the arguments of the example."""
    tools = data.draw(tools_of(name))
    assume("missing" not in tools[0]["function"]["parameters"]["required"])
    parser = parser_for(name, resources_with(tools))
    (call,) = parser.parse_text(parser.tool_format.describe(tools).split(parser.grammar.instructions)[1])[1]

    assert compile_schema(tools[0]).complaint(call.arguments) == ""


@pytest.mark.many_cases
@given(st.data())
def test_a_written_turn_is_read_back(name, parser_for, resources_of, data):
    """Calls that a conversation brings are written as the model would write them."""
    calls, content = data.draw(calls_of(name)), data.draw(CONTENTS)
    parser = parser_for(name, resources_of(*calls))

    found, parsed = parser.parse_text(parser.tool_format.write_turn(content, calls))

    assert calls == [(call.name, call.arguments) for call in parsed]
    assert content.strip() == found.strip()


@pytest.mark.many_cases
@given(st.data())
def test_messages_are_only_appended(name, parser_for, data):
    """The ids of a whole conversation are those of its prompt, its turn and the delta behind it."""
    template = data.draw(st.sampled_from(CHATS))
    chat = WrittenToolsChat(template).with_tool_format(parser_for(name).tool_format)
    tools, texts = data.draw(tools_of(name)), st.lists(HOSTILE, min_size=1, max_size=3)
    first = [{"role": role, "content": data.draw(HOSTILE)} for role in data.draw(st.sampled_from(["u", "su"]))]
    first = [{**each, "role": {"u": "user", "s": "system"}[each["role"]]} for each in first]
    plain = {"ü": 1} if name == "hermes" else {"a": "b"}
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps(plain)}}]
    turn = {"role": "assistant", "content": "So:", "tool_calls": calls}
    new = [{"role": "tool", "tool_call_id": "c", "content": text} for text in data.draw(texts)]
    new += data.draw(st.sampled_from([[], [{"role": "user", "content": "Go on."}]]))

    before, whole = chat.prompt(first, tools), chat.prompt([*first, turn, *new], tools)
    written = chat.tokenizer.encode(chat.tool_format.write_turn("So:", [("f", plain)]))
    ids = [*before, *written, chat.stop_token_ids[0]]

    assert whole.tolist() == [*ids, *chat.delta(new, ids[-1])]


def test_the_run_may_not_need_tools(parser_for):
    """Without tools, prompts are those of the template."""
    chat = WrittenToolsChat(CHATS[0]).with_tool_format(parser_for("hermes").tool_format)
    messages = [{"role": "user", "content": "Hello."}]
    np.testing.assert_array_equal(CHATS[0].prompt(messages), chat.prompt(messages))


def test_a_format_of_whole_turns_is_refused(parser_for):
    """The format of gpt-oss has headers for the text of a turn too, which only its own chat writes."""
    parser = parser_for("gpt_oss")
    assert isinstance(parser, FormattedParser)
    chat = WrittenToolsChat(CHATS[0])
    assert isinstance(chat, ToolWritingChat)
    with pytest.raises(ConfigError, match="system_prompt needs a tool parser whose format is ordinary text"):
        chat.with_tool_format(parser.tool_format)


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("hermes", "<tool_call>"),
        ("deepseek_v3", "<｜tool▁call▁end｜>"),
        ("granite", "<|tool_call|>"),
        ("kimi_k2", "<|tool_calls_section_begin|>"),
        ("mistral", "[TOOL_CALLS]"),
        ("phi4", "<|/tool_call|>"),
    ],
)
def test_a_tokenizer_with_the_tags_as_special_tokens_is_refused(name, token, parser_for):
    """The guard of contents would cut them, and the model would see other tokens than its own."""
    chat = WrittenToolsChat(ChatTemplate(byte_tokenizer(NO_TOOLS, [*SPECIAL_TOKENS, token], tags=())))
    with pytest.raises(ConfigError, match=re.escape(f"the format of the parser has the special token {token!r}")):
        chat.with_tool_format(parser_for(name).tool_format)


@pytest.mark.parametrize(
    ("name", "tool", "arguments"),
    [
        ("qwen3_coder", "a>b", {}),
        ("qwen3_coder", "f", {"text": "<tool_call>"}),
        ("glm45", "f", {"text": "<arg_key>"}),
        ("llama4_pythonic", "f", {"not a name": 1}),
        ("hermes", " f", {}),
        ("hermes", "", {}),
    ],
)
def test_a_call_that_a_format_cannot_write(name, tool, arguments, parser_for):
    """It is refused, and not shown in a form that the parser would read differently."""
    with pytest.raises(TemplateError, match=f"the format '{name}' cannot write this call of the tool '{tool}'"):
        parser_for(name).tool_format.write_turn("", [(tool, arguments)])


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"function": {"name": "f", "description": "\ud800"}}, "is no JSON: 'utf-8' codec"),
        ({"function": {"name": "f", "default": float("nan")}}, "is no JSON: Out of range"),
        ({"function": {"description": "no name"}}, "cannot write this call of the tool ''"),
    ],
)
def test_a_schema_that_cannot_be_shown(schema, why, parser_for):
    """The error says why."""
    with pytest.raises(TemplateError, match=why):
        parser_for("hermes").tool_format.describe([schema])


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ({"function": {"name": "f", "arguments": "{"}}, "the arguments of a call are no JSON object"),
        ({"function": {"name": "f", "arguments": "[]"}}, "the arguments of a call are no JSON object"),
        ({"function": {"arguments": "{}"}}, "a call has no name"),
        ("f()", "a call has no name"),
    ],
)
def test_a_malformed_call_of_a_conversation(call, why, parser_for):
    """It is refused with its place; the conversations of a run with such a turn are not compared."""
    chat = WrittenToolsChat(ChatTemplate(byte_tokenizer(NO_TOOLS), check_every=1))
    chat = chat.with_tool_format(parser_for("hermes").tool_format)
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(TemplateError, match=rf"messages\[1\] \(role 'assistant'\): {why}"):
        chat.prompt(messages)
    assert chat.check_conversation(0, messages, ()) == {}


def test_conversations_are_compared(parser_for):
    """As with the template alone: a result of a tool is what the template shows of the user."""
    chat = WrittenToolsChat(ChatTemplate(byte_tokenizer(NO_TOOLS), check_every=1))
    chat = chat.with_tool_format(parser_for("hermes").tool_format)
    call = {"function": {"name": "f", "arguments": "{}"}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "42"}
    found = chat.check_conversation(0, [{"role": "user", "content": "?"}, turn, result], ())
    assert found == {"template/compared_conversations": 1.0, "template/differing_conversations": 0.0}


def test_types_of_arguments_are_those_of_the_schema(parser_for):
    """An example in XML is read with the schemas that the prompt shows, and not with those of the run."""
    tool = {"function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}}
    parser = parser_for("qwen3_coder")
    (call,) = parser.tool_format.read(parser.tool_format.describe([tool]), ArgumentTypes([tool]))[-1:]
    assert call.arguments == {"n": 1}
