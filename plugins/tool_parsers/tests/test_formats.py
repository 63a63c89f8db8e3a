"""Hand-written turns of each format, malformed calls, reasoning, and types of XML arguments."""

from types import SimpleNamespace

import numpy as np
import pytest

from turnwise import Resources
from turnwise.errors import ConfigError
from turnwise_tool_formats.config import ParserConfig
from turnwise_tool_formats.schema_values import ArgumentTypes


def test_hand_written_turns(case, parser_for, hand_written_tools, chat):
    """Each turn of the table has the calls and the content that the table says."""
    tools = {name: SimpleNamespace(schema=schema) for name, schema in hand_written_tools.items()}
    content, calls = parser_for(case["format"], Resources(chat=chat, tools=tools)).parse_text(case["text"])

    assert case["calls"] == [[call.name, call.arguments] for call in calls if not call.error]
    assert case.get("malformed", 0) == sum(bool(call.error) for call in calls)
    assert case.get("content", "") == content


class TestMalformedCalls:
    """Each error names the mistake and ends with the form of a call."""

    @pytest.mark.parametrize(
        ("name", "text", "why"),
        [
            ("llama3_json", "<|python_tag|>x = 1", "it is not valid JSON: Expecting value at character 0"),
            ("llama3_json", "<|python_tag|> ", "it is empty"),
            ("llama3_json", '<|python_tag|>{"parameters": {}}', 'the key "name" is missing'),
            ("llama3_json", '<|python_tag|>{"name": 3}', '"name" must be a string, got a number'),
            ("llama3_json", '<|python_tag|>{"name": "a", "x": 1}', 'the key "arguments" is missing'),
            ("llama3_json", '<|python_tag|>{"name": "a", "parameters": {"x": 1, "x": 2}}', 'the key "x" is given'),
            ("llama3_json", '<|python_tag|>{"name": "a", "parameters": {"x": NaN}}', "NaN is not JSON"),
            ("llama3_json", '<|python_tag|>{"name": "a", "parameters": {"x": 1e999}}', "the number 1e999 is too large"),
            ("llama3_json", '<|python_tag|>{"name": "a", "parameters": {"x": "\\ud800"}}', "it holds half of a surr"),
            ("llama3_json", '<|python_tag|>{"name": "a", "parameters": "[]"}', "the arguments must be an object"),
            ("llama3_json", '<|python_tag|>{"name": "a", "parameters": "{"}', "the arguments are a string, and it is"),
            ("llama3_json", '<|python_tag|>' + '{"a": ' * 100_000, "its JSON is nested too deeply"),
            ("llama3_json", '<|python_tag|>{"name": "a", "parameters": {"x": ' + "9" * 5000 + "}}", "it is not valid"),
            ("llama3_json", '<|python_tag|>{"name": "a", "parameters": "{} {}"}', "the arguments are a string, and"),
            ("llama4_pythonic", "[f(x=1 y=2)]", "it is not a Python call: expected ',' or ')' at character 5"),
            ("llama4_pythonic", "[f(x=1, x=2)]", "the argument 'x' is given twice"),
            ("llama4_pythonic", "[f(x={'a': 1, 'a': 2})]", "the key 'a' is given twice"),
            ("llama4_pythonic", "[f(x={1: 2})]", "it is not a Python call: expected a key in quotes at character 5"),
            ("llama4_pythonic", "[f(x=y)]", "y is not a value: write texts in quotes"),
            ("llama4_pythonic", "[f(x=1e999)]", "the number 1e999 is too large"),
            ("llama4_pythonic", '[f(x="\\ud800")]', "it holds half of a surrogate pair"),
            ("llama4_pythonic", '[f(x="\\U00110000")]', "\\U00110000 is no character"),
            ("llama4_pythonic", "[f(x=" + "9" * 5000 + ")]", "it holds a number that cannot be read"),
            ("llama4_pythonic", "[f(x=" + "[" * 300 + "]" * 300 + ")]", "its values are nested too deeply"),
            ("llama4_pythonic", "[f(x=" + "[" * 100 + "]" * 100 + ")]", "its values are nested more than"),
            ("llama4_pythonic", "[f(x=}", "it is not a Python call: expected a value, got '}'"),
            ("llama4_pythonic", '[f(x="', "it is not a Python call: expected a value at character 4"),
            ("qwen3_coder", "<tool_call>get(x)</tool_call>", "<function=<tool>> is missing"),
            ("qwen3_coder", "<function=f><parameter=a>1</function>", "the parameter 'a' has no </parameter>"),
            ("qwen3_coder", "<function=f>" + "<parameter=a>1</parameter>" * 2, "the parameter 'a' is given twice"),
            ("qwen3_coder", "<function=f>x</function>", "</function> is missing"),
            ("qwen3_coder", "<function= ></function>", "the name is empty"),
            ("glm45", "<tool_call><arg_key>a</arg_key></tool_call>", "the name is missing"),
            ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>", "the value of 'a' has no"),
            ("glm45", "<tool_call>f" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 2 + "</tool_call>", "the arg"),
            ("glm45", "<tool_call>f", "its closing tag is missing"),
            ("mistral", "[TOOL_CALLS]f[ARGS]x", "it is not valid JSON"),
            ("mistral", "[TOOL_CALLS]f[ARGS]3", "the arguments must be an object, got a number"),
            ("mistral", "[TOOL_CALLS][ ]", "the list holds no call"),
            ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>", "<｜tool▁sep｜> is missing"),
            ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}<｜tool▁call▁end｜>", "```"),
            ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{} x<｜tool▁call▁end｜>", "there is text after its"),
            ("deepseek_v3", "<｜tool▁calls▁begin｜>x<｜tool▁calls▁end｜>", "the section holds no call"),
            ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "its closing tag is missing"),
            ("kimi_k2", "<|tool_call_begin|>functions.f:0{}<|tool_call_end|>", "<|tool_call_argument_begin|> is"),
            ("kimi_k2", "<|tool_call_begin|>3<|tool_call_argument_begin|>{}<|tool_call_end|>", "'3' is an index"),
            ("gpt_oss", "<|channel|>commentary to=f json<|message|>{} {}<|call|>", "there is text after its JSON"),
            ("granite", "<|tool_call|>[3]", "expected a JSON object, got a number"),
            ("granite", "<|tool_call|>[{}", 'the key "name" is missing'),
            ("phi4", "functools[x]", "it is not valid JSON"),
        ],
    )  # fmt: skip
    def test_each_mistake_has_an_error(self, parser_for, name, text, why):
        """The first call of the turn is malformed."""
        call = parser_for(name).parse_text(text)[1][0]

        assert call.error.startswith(f"Error: this tool call is malformed: {why}")
        assert call.error.endswith(f"Write {parser_for(name).grammar.form}")
        assert {} == call.arguments

    def test_commas_may_follow_the_last_value(self, parser_for):
        """As in Python."""
        (call,) = parser_for("llama4_pythonic").parse_text("[f(x=[1, (2,),], y={'a': 1,},)]")[1]

        assert ("", {"x": [1, [2]], "y": {"a": 1}}) == (call.error, call.arguments)

    @pytest.mark.parametrize(
        ("name", "text"),
        [("llama4_pythonic", "[f(x=1) g()]"), ("phi4", 'functools[{"name": "f", "arguments": {"x": 1}} {}]')],
    )
    def test_a_list_without_a_comma(self, parser_for, name, text):
        """The call before the mistake is kept."""
        good, bad = parser_for(name).parse_text(text)[1]

        assert ("f", {"x": 1}) == (good.name, good.arguments)
        assert "the list of calls lacks a ',' or its ']'" in bad.error

    def test_a_mistake_hides_no_other_call(self, turn, render, parser_for, resources_of):
        """The calls before and after a broken one are read."""
        good = ("add", {"a": 1})
        text = render(turn, "", [good])
        broken = text.replace("{", "{{").replace("(", "((").replace("<parameter=a>", "").replace("<arg_value>", "")

        _content, calls = parser_for(turn, resources_of(good)).parse_text(f"{text} {broken} {text}")

        assert broken != text
        assert [good, good] == [(call.name, call.arguments) for call in calls if not call.error]
        assert any(call.error for call in calls)

    def test_a_call_after_many_malformed_ones_is_read(self, turn, render, parser_for, resources_of):
        """The limit that keeps parsing linear loses no well-formed call."""
        good = [("add", {"a": 1}), ("sub", {"b": "x"})]
        text = render(turn, "", good)
        broken = text[: len(text) // 2]

        _content, calls = parser_for(turn, resources_of(*good)).parse_text(broken * 60 + text)

        assert good == [(call.name, call.arguments) for call in calls if not call.error][-2:]

    def test_tokens_that_cannot_be_decoded(self, parser_for, chat):
        """The answer is a malformed call."""
        broken = SimpleNamespace(text=lambda _ids: [][0], prompt=chat.prompt, tokenizer=chat.tokenizer)
        content, (call,) = parser_for("phi4", Resources(chat=broken)).parse(np.zeros(3, np.int32))

        assert "" == content
        assert "its tokens cannot be decoded (IndexError)" in call.error


class TestReasoning:
    """Calls inside reasoning are text."""

    @pytest.mark.parametrize("starts", [False, True])
    def test_only_calls_outside_count(self, turn, render, parser_for, resources_of, starts):
        """A turn may start inside reasoning."""
        if turn.startswith("gpt_oss"):
            pytest.skip("gpt-oss has a channel for reasoning")
        good = ("add", {"a": 1})
        text = render(turn, "", [good])
        opening, closing = ("[THINK]", "[/THINK]") if turn.startswith("mistral") else ("<think>", "</think>")
        thought = f"{'' if starts else opening}Hm: {text} {closing}"

        parser = parser_for(turn, resources_of(good), starts_in_reasoning=starts)

        assert [good] == [(call.name, call.arguments) for call in parser.parse_text(thought + text)[1]]
        assert (thought[:-9], ()) == parser.parse_text(thought[:-9])

    @pytest.mark.parametrize(
        ("name", "call"), [("llama3_json", '{"name": "f", "parameters": {}}'), ("llama4_pythonic", "[f()]")]
    )
    def test_a_bare_call_may_follow_reasoning(self, parser_for, name, call):
        """Reasoning before a call leaves it at the start of the turn; other text does not."""
        parser = parser_for(name)

        assert 1 == len(parser.parse_text(f" <think>Hm.</think>\n{call}")[1])
        assert (f"So: <think>Hm.</think>{call}", ()) == parser.parse_text(f"So: <think>Hm.</think>{call}")

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"reasoning_open_tag": ""}, "set both, or set both to the empty string"),
            ({"reasoning_open_tag": "x", "reasoning_close_tag": "x"}, "must differ"),
            ({"reasoning_open_tag": "", "reasoning_close_tag": "", "starts_in_reasoning": True}, "starts_in_reasoning"),
            ({"max_depth": 1}, "max_depth"),
        ],
    )
    def test_invalid_options_are_named(self, options, text):
        """The error names the option."""
        with pytest.raises(ValueError, match=text):
            ParserConfig(**options)

    def test_a_run_without_a_tokenizer_is_refused(self, parser_for):
        """The error says that the parser needs a model directory."""
        with pytest.raises(ConfigError, match="tool parser 'glm45' reads text"):
            parser_for("glm45", Resources(seed=1))


class TestSchemaTypes:
    """The tool's schema decides which value a text of an XML format has."""

    @pytest.mark.parametrize(
        ("schema", "text", "value"),
        [
            ({"type": "string"}, "5", "5"),
            ({"type": "integer"}, " 5 ", 5),
            ({"type": "integer"}, "5.0", 5.0),
            ({"type": "integer"}, "five", "five"),
            ({"type": "number"}, "-2", -2),
            ({"type": "number"}, "1e999", "1e999"),
            ({"type": "boolean"}, "True", True),
            ({"type": "boolean"}, "1", "1"),
            ({"type": ["integer", "null"]}, "None", None),
            ({"type": ["string", "integer"]}, "5", 5),
            ({"type": ["string", "integer"]}, '"5"', '"5"'),
            ({"type": "array"}, '["a", 1]', ["a", 1]),
            ({"type": "object"}, '{"a": "\\ud800"}', '{"a": "\\ud800"}'),
            ({"enum": [1, 2]}, "2", 2),
            ({"enum": ["1", "2"]}, "2", "2"),
            ({"const": None}, "null", None),
            ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
            ({"allOf": [{"type": ["integer", "string"]}, {"type": "string"}]}, "3", "3"),
            ({"anyOf": [{}]}, "3", "3"),
            ({"$ref": "#/$defs/n"}, "3", 3),
            ({"$ref": "#/$defs/loop"}, "3", "3"),
            ({"$ref": "#/$defs/missing"}, "3", "3"),
            ({}, "3", "3"),
            (True, "3", "3"),
        ],
    )
    def test_values(self, schema, text, value):
        """A text that is no value of an allowed type stays a text."""
        definitions = {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}
        parameters = {"type": "object", "properties": {"x": schema}, "$defs": definitions}
        types = ArgumentTypes([{"type": "function", "function": {"name": "f", "parameters": parameters}}])

        found = types.convert("f", "x", text, 64)

        assert (value, type(value)) == (found, type(found))
        assert text == types.convert("f", "unknown", text, 64)
        assert text == types.convert("unknown", "x", text, 64)
