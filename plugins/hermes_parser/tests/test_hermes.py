"""The parser `hermes`: tags, arguments in a string, reasoning, and malformed calls."""

import json

import numpy as np
import pytest

from turnwise import Resources, ToolCall
from turnwise.errors import ConfigError
from turnwise_chat_templates.template import ChatTemplate
from turnwise_hermes_parser import HermesConfig, make_hermes
from turnwise_testing.inputs.tokenizers import byte_tokenizer

CHAT = ChatTemplate(byte_tokenizer())
OPEN, CLOSE = "<tool_call>", "</tool_call>"
GOOD = '{"name": "add", "arguments": {"a": 1}}'
ADD = ToolCall(name="add", arguments={"a": 1}, raw=GOOD)


def parser(**options):
    return make_hermes(HermesConfig(**options), Resources(chat=CHAT))


def parse(text, **options):
    return parser(**options).parse_text(text)


def error_of(body):
    """Return the reason why the only call of a turn is malformed."""
    _content, (call,) = parse(f"{OPEN}{body}{CLOSE}")
    assert call.raw == body
    assert call.arguments == {}
    why, _, form = call.error.partition(". Write ")
    assert form == '{"name": "<tool>", "arguments": {...}} between the tags of a tool call.'
    return why.removeprefix("Error: this tool call is malformed: ")


def nested(depth):
    return '{"name": "add", "arguments": {"x": ' + "[" * depth + "]" * depth + "}}"


class TestWellFormedCalls:
    """Well-formed calls."""

    def test_text_around_calls_is_the_content(self):
        """The content is not trimmed, and white space between tags and JSON is allowed."""
        content, calls = parse(f"Let me see.\n{OPEN}\n{GOOD}\n{CLOSE} and {OPEN}{GOOD}{CLOSE}\n")
        assert content == "Let me see.\n and \n"
        assert [call.raw.strip() for call in calls] == [GOOD, GOOD]
        assert [(call.name, call.arguments, call.error) for call in calls] == [("add", {"a": 1}, "")] * 2

    def test_token_ids_are_decoded(self):
        """Tags may be single tokens, and the end-of-turn token is not part of the text."""
        ids = np.array([*CHAT.tokenizer.encode(f"x{OPEN}{GOOD}{CLOSE}"), CHAT.stop_token_ids[0]], np.int32)
        assert parser().parse(ids) == ("x", (ADD,))

    def test_arguments_as_a_json_string_are_decoded(self):
        """Some models write arguments in the OpenAI format."""
        body = json.dumps({"name": "add", "arguments": ' {"a": 1} '})
        (call,) = parse(f"{OPEN}{body}{CLOSE}")[1]
        assert call == ToolCall(name="add", arguments={"a": 1}, raw=body)

    def test_a_name_alone_means_no_arguments(self):
        """Keys beside name and `arguments` are ignored."""
        (call,) = parse(f'{OPEN}{{"name": "now"}}{CLOSE}')[1]
        assert call == ToolCall(name="now", raw='{"name": "now"}')
        (call,) = parse(f'{OPEN}{{"id": 3, "name": "now", "arguments": {{}}}}{CLOSE}')[1]
        assert (call.name, call.error) == ("now", "")

    @pytest.mark.parametrize("text", [OPEN, CLOSE, f"{OPEN}{GOOD}{CLOSE}", "<think>", "</think>"])
    def test_tags_inside_arguments_are_text(self, text):
        """The JSON decides where a call ends, not the first closing tag."""
        body = json.dumps({"name": "write", "arguments": {"text": text}})
        content, (call, after) = parse(f"a{OPEN}{body}{CLOSE}b{OPEN}{GOOD}{CLOSE}")
        assert (content, call.arguments, after) == ("ab", {"text": text}, ADD)

    def test_tags_are_configurable(self):
        """Any distinct texts can be tags."""
        options = {"open_tag": "[[", "close_tag": "]]", "reasoning_open_tag": "(", "reasoning_close_tag": ")"}
        assert parse(f"( [[ ) [[{GOOD}]]", **options) == ("( [[ ) ", (ADD,))
        assert parse(f"{OPEN}{GOOD}{CLOSE}", **options) == (f"{OPEN}{GOOD}{CLOSE}", ())

    def test_unicode_escapes_are_decoded(self):
        """A complete surrogate pair is one character."""
        (call,) = parse(f'{OPEN}{{"name": "say", "arguments": {{"t": "\\ud83c\\udf0d\\u00e4"}}}}{CLOSE}')[1]
        assert call.arguments == {"t": "🌍ä"}


class TestReasoning:
    """The parser ignores tags inside reasoning."""

    @pytest.mark.parametrize(
        ("text", "num_calls"),
        [
            (f"<think>{OPEN}{GOOD}{CLOSE}</think>done", 0),
            (f"<think>I could write {OPEN} here.</think>{OPEN}{GOOD}{CLOSE}", 1),
            (f"<think>a</think>{OPEN}{GOOD}{CLOSE}<think>{OPEN}</think>{OPEN}{GOOD}{CLOSE}", 2),
            (f"<think>never ends {OPEN}{GOOD}{CLOSE}", 0),
            (f"{OPEN}{GOOD}{CLOSE}<think>{OPEN}", 1),
            (f"stray </think>{OPEN}{GOOD}{CLOSE}", 1),
        ],
    )
    def test_only_calls_outside_count(self, text, num_calls):
        """Calls inside reasoning stay in the content, unchanged."""
        content, calls = parse(text)
        assert calls == (ADD,) * num_calls
        assert content == text.replace(f"{OPEN}{GOOD}{CLOSE}", "") if num_calls else content == text

    def test_a_turn_may_start_in_reasoning(self):
        """If the prompt ends with the opening tag, the turn has only the closing tag."""
        text = f"hm {OPEN}{GOOD}{CLOSE}</think>{OPEN}{GOOD}{CLOSE}"
        assert parse(text, starts_in_reasoning=True) == (f"hm {OPEN}{GOOD}{CLOSE}</think>", (ADD,))
        assert parse(text)[1] == (ADD, ADD)
        assert parse(f"hm {OPEN}{GOOD}{CLOSE}", starts_in_reasoning=True)[1] == ()

    def test_a_model_without_reasoning(self):
        """Empty tags disable the detection of reasoning."""
        text = f"<think>{OPEN}{GOOD}{CLOSE}</think>"
        assert parse(text, reasoning_open_tag="", reasoning_close_tag="")[1] == (ADD,)


class TestMalformedCalls:
    """Malformed calls, each with an error for the model."""

    @pytest.mark.parametrize(
        ("body", "why"),
        [
            ("", "it is empty"),
            (" \n", "it is empty"),
            ("add(1)", "it is not valid JSON: Expecting value at character 0"),
            ("\nadd(1)", "it is not valid JSON: Expecting value at character 1"),
            ('{"name": "add", "arguments": {"a": 1}', "it is not valid JSON: Expecting ',' delimiter at character 37"),
            ('{"name": "add",}', "it is not valid JSON: "),
            ('{"name": "a\nb"}', "it is not valid JSON: Invalid control character at character 11"),
            (GOOD + "}", "there is text after its JSON"),
            (GOOD + GOOD, "there is text after its JSON"),
            ("[]", "expected a JSON object, got an array"),
            ("3", "expected a JSON object, got a number"),
            ("null", "expected a JSON object, got null"),
            ('"add"', "expected a JSON object, got a string"),
            ("{}", 'the key "name" is missing'),
            ('{"name": null, "arguments": {}}', '"name" must be a string, got null'),
            ('{"name": " ", "arguments": {}}', "the name is empty"),
            ('{"name": "add", "parameters": {}}', 'the key "arguments" is missing'),
            ('{"name": "add", "arguments": [1]}', "the arguments must be an object, got an array"),
            ('{"name": "add", "arguments": null}', "the arguments must be an object, got null"),
            ('{"name": "add", "arguments": true}', "the arguments must be an object, got a boolean"),
            ('{"name": "add", "arguments": "1"}', "the arguments must be an object, got a number"),
            (
                '{"name": "add", "arguments": ""}',
                "the arguments are a string, and it is not valid JSON: Expecting value at character 0",
            ),
            ('{"name": "add", "arguments": "{} {}"}', "the arguments are a string, and there is text after its JSON"),
            ('{"name": "add", "arguments": {"a": 1, "a": 2}}', 'the key "a" is given twice'),
            ('{"name": "add", "name": "sub"}', 'the key "name" is given twice'),
            ('{"name": "add", "arguments": {"a": NaN}}', "NaN is not JSON"),
            ('{"name": "add", "arguments": {"a": -Infinity}}', "-Infinity is not JSON"),
            ('{"name": "add", "arguments": {"a": 1e999}}', "the number 1e999 is too large"),
            ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "it is not valid JSON: an integer has more"),
            ('{"name": "add", "arguments": {"a": "\\ud800"}}', "it holds half of a surrogate pair"),
            ('{"name": "add", "arguments": {"\\udfff": 1}}', "it holds half of a surrogate pair"),
            (nested(64), "its values are nested more than 65 levels deep"),
            (nested(100_000), "its JSON is nested too deeply"),
            (
                json.dumps({"name": "add", "arguments": '{"x":' * 70 + "1" + "}" * 70}),
                "the arguments are a string, and its",
            ),
        ],
    )
    def test_each_mistake_has_an_error(self, body, why):
        """The error names the mistake and shows how to write a call."""
        assert error_of(body).startswith(why)

    def test_nesting_up_to_the_limit_is_allowed(self):
        """The arguments count as a level."""
        assert parse(f"{OPEN}{nested(63)}{CLOSE}")[1][0].error == ""
        assert parse(f"{OPEN}{nested(10)}{CLOSE}", max_depth=10)[1][0].error != ""

    def test_a_malformed_call_keeps_a_valid_name(self):
        """Logs and the response to the model show it."""
        (call,) = parse(f'{OPEN}{{"name": "add", "arguments": 3}}{CLOSE}')[1]
        assert call.name == "add"

    @pytest.mark.parametrize(
        ("text", "content", "raws"),
        [
            (f"a{OPEN}{GOOD}", "a", [GOOD]),
            (f"a{OPEN}", "a", [""]),
            (f'{OPEN}{{"name": "ad', "", ['{"name": "ad']),
            (f"{OPEN}{{{OPEN}{GOOD}{CLOSE}b", "b", ["{", GOOD]),
            (f"{OPEN}{GOOD}{OPEN}{GOOD}{CLOSE}b", "b", [GOOD, GOOD]),
            (f"{OPEN}{OPEN}{GOOD}{CLOSE}", "", ["", GOOD]),
        ],
    )
    def test_a_call_without_its_closing_tag(self, text, content, raws):
        """It ends at the end of the turn or at the next opening tag, and the next call is parsed."""
        found, calls = parse(text)
        assert (found, [call.raw for call in calls]) == (content, raws)
        assert "its closing tag is missing" in calls[0].error
        assert calls[1:] == (ADD,) * (len(raws) - 1)

    def test_a_mistake_hides_no_other_call(self):
        """Well-formed calls before and after malformed ones are parsed."""
        _content, calls = parse(f"{OPEN}x{CLOSE}{OPEN}{GOOD}{CLOSE}{OPEN}[{CLOSE}{OPEN}{GOOD}{CLOSE}")
        assert [bool(call.error) for call in calls] == [True, False, True, False]

    def test_a_call_after_many_malformed_ones_is_parsed(self):
        """The limit that keeps parsing linear loses no well-formed call."""
        _content, calls = parse(f"{OPEN}[{CLOSE}" * 40 + f"{OPEN}{GOOD}{CLOSE}")
        assert [call for call in calls if not call.error] == [ADD]
        assert len(calls) == 41

    def test_a_closing_tag_alone_is_text(self):
        """Only an opening tag starts a call."""
        assert parse(f"a{CLOSE}b") == (f"a{CLOSE}b", ())
        assert parse(f"{CLOSE}{OPEN}{GOOD}{CLOSE}") == (CLOSE, (ADD,))


class TestConfig:
    """Invalid options are refused."""

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"open_tag": ""}, "open_tag"),
            ({"open_tag": "<a>", "close_tag": "<a>"}, "the tag '<a>' is also part of another tag"),
            ({"open_tag": "<", "close_tag": ">"}, "the tag '<' is also part of another tag"),
            ({"reasoning_open_tag": ""}, "set both, or set both to the empty string"),
            ({"reasoning_open_tag": "", "reasoning_close_tag": "", "starts_in_reasoning": True}, "starts_in_reasoning"),
            ({"max_depth": 1}, "max_depth"),
        ],
    )
    def test_invalid_options_are_named(self, options, text):
        """The error names the option or the tag."""
        with pytest.raises(ValueError, match=text):
            HermesConfig(**options)

    def test_a_run_without_a_tokenizer_is_refused(self):
        """The error says that the parser needs a model directory."""
        with pytest.raises(ConfigError, match="tool parser 'hermes' reads text"):
            make_hermes(HermesConfig(), Resources())
