"""Tests of the parser `hermes`: well-formed calls, reasoning, malformed calls, and arbitrary text."""

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from turnwise import Resources, ToolCall
from turnwise.chat.template import ChatTemplate
from turnwise.errors import ConfigError
from turnwise_hermes_parser import make_hermes
from turnwise_hermes_parser import parser as parser_module
from turnwise_hermes_parser.call import MalformedError, read_json
from turnwise_hermes_parser.config import HermesConfig
from turnwise_testing.tokenizers import byte_tokenizer

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
            ('{"name": " ", "arguments": {}}', '"name" is empty'),
            ('{"name": "add", "parameters": {}}', 'the key "arguments" is missing'),
            ('{"name": "add", "arguments": [1]}', '"arguments" must be a JSON object, got an array'),
            ('{"name": "add", "arguments": null}', '"arguments" must be a JSON object, got null'),
            ('{"name": "add", "arguments": true}', '"arguments" must be a JSON object, got a boolean'),
            ('{"name": "add", "arguments": "1"}', '"arguments" must be a JSON object, got a number'),
            (
                '{"name": "add", "arguments": ""}',
                '"arguments" is a string, and it is not valid JSON: Expecting value at character 0',
            ),
            ('{"name": "add", "arguments": "{} {}"}', '"arguments" is a string, and there is text after its JSON'),
            ('{"name": "add", "arguments": {"a": 1, "a": 2}}', 'the key "a" is given twice'),
            ('{"name": "add", "name": "sub"}', 'the key "name" is given twice'),
            ('{"name": "add", "arguments": {"a": NaN}}', "NaN is not JSON"),
            ('{"name": "add", "arguments": {"a": -Infinity}}', "-Infinity is not JSON"),
            ('{"name": "add", "arguments": {"a": 1e999}}', "the number 1e999 is too large"),
            ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "it is not valid JSON: Exceeds the limit"),
            ('{"name": "add", "arguments": {"a": "\\ud800"}}', "it holds half of a surrogate pair"),
            ('{"name": "add", "arguments": {"\\udfff": 1}}', "it holds half of a surrogate pair"),
            (nested(63), "its JSON is nested more than 64 levels deep"),
            (nested(100_000), "its JSON is nested too deeply"),
            (
                json.dumps({"name": "add", "arguments": '{"x":' * 70 + "1" + "}" * 70}),
                '"arguments" is a string, and its',
            ),
        ],
    )
    def test_each_mistake_has_an_error(self, body, why):
        """The error names the mistake and shows how to write a call."""
        assert error_of(body).startswith(why)

    def test_nesting_up_to_the_limit_is_allowed(self):
        """The call and its arguments count as two levels."""
        assert parse(f"{OPEN}{nested(62)}{CLOSE}")[1][0].error == ""
        assert parse(f"{OPEN}{nested(9)}{CLOSE}", max_depth=10)[1][0].error != ""

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


PIECES = st.sampled_from(
    [
        OPEN,
        CLOSE,
        "<think>",
        "</think>",
        GOOD,
        "{",
        "}",
        "[",
        "]",
        '"',
        ":",
        ",",
        "name",
        "arguments",
        "\\",
        "\\u",
        "d8",
        "1e9",
    ]
)
TURNS = st.lists(PIECES | st.text(max_size=5), max_size=30).map("".join)
JSON_OBJECTS = st.dictionaries(
    st.text(),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


class TestProperties:
    """Properties of any text and any ids."""

    @given(TURNS, st.booleans())
    @example("\x00\ud800".encode(errors="replace").decode(), True)
    def test_any_text_can_be_parsed(self, text, starts_in_reasoning):
        """Nothing is raised, content and calls are parts of the text, and well-formed calls contain JSON."""
        content, calls = parse(text, starts_in_reasoning=starts_in_reasoning)
        assert len(content) + sum(len(call.raw) for call in calls) <= len(text)
        for call in calls:
            assert call.raw in text
            if not call.error:
                assert json.loads(json.dumps(call.arguments, allow_nan=False)) == call.arguments
                json.dumps(call.arguments, ensure_ascii=False).encode()

    @given(st.lists(st.integers(-5, 300) | st.integers(-(2**31), 2**31 - 1), max_size=30))
    def test_any_ids_can_be_parsed(self, ids):
        """Ids outside the vocabulary give at worst a malformed call."""
        content, calls = parser().parse(np.array(ids, np.int32))
        assert isinstance(content, str)
        assert all(isinstance(call, ToolCall) for call in calls)

    @settings(max_examples=50)
    @given(JSON_OBJECTS, st.text(min_size=1).filter(str.strip), st.booleans())
    def test_name_and_arguments_survive_a_round_trip(self, arguments, name, ascii_only):
        """Any name and any arguments, with tags inside them too."""
        body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii_only)
        content, (call,) = parse(f"a {OPEN}{body}{CLOSE} b")
        assert (content, call) == ("a  b", ToolCall(name=name, arguments=arguments, raw=body))

    @settings(max_examples=50)
    @given(TURNS, st.data())
    def test_tokenization_changes_nothing(self, text, data):
        """A tag may be one token, several tokens, or part of a token."""
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
        parts = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        ids = [token_id for part in parts for token_id in CHAT.tokenizer.encode(part)]
        assert parser().parse(np.array(ids, np.int32)) == parse(text)

    @pytest.mark.parametrize(
        "unit",
        [
            OPEN,
            f'{OPEN}["',
            f'{OPEN}[",", "',
            f"{OPEN}{{",
            f'{OPEN}"x',
            f'{OPEN}["<think>", "',
            '<think>{"',
            f"{OPEN}{GOOD}",
        ],
    )
    def test_work_is_linear_in_the_text(self, unit, monkeypatch):
        """However a turn of 400 kB repeats itself, its JSON is read at most 20 times."""
        text = unit * (400_000 // len(unit))
        num_read = 0

        def count(source, start):
            nonlocal num_read
            try:
                value, stop = read_json(source, start)
            except MalformedError:
                num_read += len(source) - start  # at most: a failed attempt may read to the end
                raise
            num_read += stop - start
            return value, stop

        monkeypatch.setattr(parser_module, "read_json", count)
        _content, calls = parse(text)
        assert num_read <= 20 * len(text)
        assert bool(calls) == text.startswith(OPEN)


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
