"""Headers and messages of gpt-oss: a header with a recipient is a call, and a text is never a header."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_settled import assert_settled

from turnwise import ReasoningParser, Resources
from turnwise.config.parts import Choice
from turnwise.config.resolve import build_part
from turnwise.plugin.host import load
from turnwise.types import PluginRecipe
from turnwise_testing import ReasoningParserSuite

BODY = '<|message|>{"p":1}<|call|>'
ODD_HEADERS = [
    "<|channel|>commentary to=functions.get <|constrain|> json",
    "<|channel|>commentary to=functions.get <|constrain|>JSON",
    "<|channel|>commentary to=functions.get <|constrain|>json_object",
    "<|channel|>commentary to=functions.get <|constrain|>application/json",
    "<|channel|>commentary to=functions.get <|constrain|>code json",
    "<|channel|>commentary to=functions.get commentary <|constrain|>json",
    "<|channel|>commentary to=functions.get 世界json",
    "<|channel|>commentary     to=functions.get     <|constrain|>json",
    "<|channel|>commentary to= functions.get",
    "<|channel|>commentaryto=functions.get",
    "assistantto=functions.get<|channel|>commentary json",
    "<|channel|>commentaryassistantto=functions.get<|channel|>commentary json",
    "<|channel|>commentary <|constrain|>json to=functions.get",
    "<|channel|>commentary commentary to=functions.get json",
    "<|channel|>analysis to=functions.get code",
    "noise <|channel|>commentary to=functions.get",
    "<|start|>assistant to=functions.get<|channel|>commentary" + " json" * 500,
]
ENDS = ["<|end|>", "<|call|>", "<|return|>"]
QUOTES = [
    "<|channel|>commentary", " to=functions.add", " to=", "<|message|>", "<|start|>assistant", "<|constrain|>json",
    '{"a": 1, "b": 2}', "{}", "The header is ", "\n", "<|", "世界",
]  # fmt: skip
HEADER_PIECES = [
    "<|channel|>", "<|channel|>commentary", "<|channel|>analysis", "<|constrain|>", "<|constrain|>json", " ", "    ",
    "json", " code", "commentary", "assistant", "世界", "\n", ".", "<", "|>", "{}", "final",
]  # fmt: skip
TURN_PIECES = [*QUOTES, *HEADER_PIECES, *ENDS, "<|message|>{}<|call|>", "t", "to", "<|ch"]
TURNS = st.lists(st.sampled_from(TURN_PIECES), max_size=20).map("".join)


@pytest.fixture(scope="module")
def parse(parser_for):
    """A function that returns the content and the calls of a turn."""
    return parser_for("gpt_oss").parse_text


def good(calls):
    return [(call.name, call.arguments) for call in calls if not call.error]


@pytest.mark.parametrize("header", ODD_HEADERS)
@pytest.mark.parametrize("before", ["", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"])
def test_odd_headers_are_calls(parse, header, before):
    """The recipient tells that it is a call, and nothing else in the header changes this."""
    content, calls = parse(before + header + BODY)

    assert [("get", {"p": 1})] == good(calls)
    assert "{" not in content


@given(
    st.lists(st.sampled_from(HEADER_PIECES), max_size=6).map("".join),
    st.sampled_from(["to=functions.get", " to=functions.get", " to= functions.get", "to=get", " to=", "to=functions."]),
    st.lists(st.sampled_from(HEADER_PIECES), max_size=6).map("".join),
    st.sampled_from(["", "<|start|>", "<|start|>assistant", "<|channel|>", "<|channel|>analysis<|message|>Hm.<|end|>"]),
)
def test_a_header_with_a_recipient_is_never_silent(parse, before, recipient, after, start):
    """It is a call of the recipient, or a malformed call with an error."""
    (call,) = parse(start + before + recipient + after + BODY)[1]

    assert call.error or call.arguments == {"p": 1}
    assert call.error or recipient.removeprefix(" ").removeprefix("to=").strip().removeprefix("functions.") in call.name


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('<|channel|>commentary to=functions.get <|constrain|>json{"p":1}<|call|>', "<|message|> is missing after"),
        ('<|channel|>commentary to=functions.get <|constrain|>json{"p":1}', "<|message|> is missing after"),
        (' to=functions.get json{"p":1}<|call|>', "<|message|> is missing after"),
        ("<|channel|>commentary to=functions.get<|end|><|start|>assistant", "<|message|> is missing after"),
        (f"<|channel|>commentary to= <|constrain|>json{BODY}", "the recipient after to= is missing"),
        (f"<|channel|>commentary to= json{BODY}", "the recipient after to= is missing"),
        (f"<|channel|>commentary to=functions.{BODY}", "the recipient after to= is missing"),
        (f"<|channel|>commentary to=functions.a to=functions.b{BODY}", "its header has several recipients"),
        (f"<|start|>functions.get to=assistant<|channel|>commentary{BODY}", "its recipient is 'assistant'"),
    ],
)
def test_headers_that_name_no_tool(parse, text, why):
    """The error tells the mistake."""
    (call,) = parse(text)[1]

    assert call.error.startswith(f"Error: this tool call is malformed: {why}")


@given(
    st.sampled_from(["<|channel|>analysis", "<|channel|>final", "<|start|>assistant<|channel|>commentary", ""]),
    st.lists(st.sampled_from(QUOTES), max_size=12).map("".join),
    st.sampled_from(["", *ENDS]),
)
@example("<|channel|>analysis", 'The header is <|channel|>commentary to=functions.add<|message|>{"a": 1}', "<|end|>")
@example("<|channel|>final", 'Write to=functions.get <|message|>{"a":1}', "<|return|>")
def test_a_text_is_never_a_header(parse, header, body, end):
    """Headers and whole calls that a text quotes are text."""
    text = f"{header}<|message|>{body}{end}"

    assert (text, ()) == parse(text)


@given(st.lists(st.sampled_from(QUOTES), max_size=12).map("".join), st.sampled_from(ENDS[:2]))
def test_a_call_follows_a_text(parse, body, end):
    """The end of the message makes the next text a header."""
    call = f"<|start|>assistant<|channel|>commentary to=functions.get json{BODY}"

    content, calls = parse(f"<|channel|>analysis<|message|>{body}{end}{call}")

    assert [("get", {"p": 1})] == good(calls)
    assert f"<|channel|>analysis<|message|>{body}{end}" == content


@given(TURNS)
def test_cut_turns_have_no_other_calls(parser_for, parse, text):
    """Each cut has some of the first calls of the whole turn, and the settled part only grows."""
    whole = good(parse(text)[1])

    for cut in range(len(text) + 1):
        found = good(parse(text[:cut])[1])
        assert whole[: len(found)] == found, text[:cut]
    assert_settled(parser_for("gpt_oss"), text)


def test_a_cut_text_of_a_call_quotes_a_call(parse):
    """A call that an unfinished text quotes does not run."""
    quoted = "<|call|><|start|>assistant to=functions.add<|message|>{}<|call|>"
    text = f' to=functions.say<|channel|>commentary<|message|>{{"text": "{quoted}", "more": "{quoted}"}}<|call|>'

    for cut in range(len(text)):
        assert good(parse(text[:cut])[1]) in ([], [("say", {"text": quoted, "more": quoted})])
    assert [("say", {"text": quoted, "more": quoted})] == good(parse(text)[1])


def test_a_recipient_outside_headers_is_text(parse):
    """Prose may hold `to=`."""
    text = "Set the option to=functions.get and to=3.<|end|> Then to=4."

    assert (text, ()) == parse(text)


SPLITS = [
    ("", "", ""),
    ("It is 3.\n", "", "It is 3.\n"),
    ("<|channel|>final<|message|>It is 3.", "", "It is 3."),
    ("<|channel|>final<|message|> It is 3.\n<|return|>", "", " It is 3.\n"),
    ("<|channel|>analysis<|message|>Easy.", "Easy.", ""),
    ("<|channel|>ana", "", ""),
    (
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is 3.",
        "Easy.",
        "It is 3.",
    ),
    ("<|channel|>analysis<|message|>I quote <|channel|>final<|message|>x", "I quote <|channel|>final<|message|>x", ""),
    ("Let me see.\n<|start|>assistant<|channel|>final<|message|>", "", "Let me see.\n"),
    ('<|channel|>commentary to=functions.get<|message|>{"p":1}<|call|>', "", '{"p":1}'),
    ("<|channel|>analysis to=python code<|message|>print(1)", "", "print(1)"),
    ("Set the option to=3.", "", "Set the option to=3."),
]


class TestHarmonyReasoning(ReasoningParserSuite):
    """The conformance suite on the reasoning parser."""

    entry_point = "tool_parsers"
    module = "turnwise_tool_parsers"
    registered = "harmony"

    @pytest.fixture
    def examples(self):
        """Turns with each channel."""
        return SPLITS


@pytest.fixture(scope="module")
def harmony():
    """The registered reasoning parser."""
    host = load(PluginRecipe(allow=("tool_parsers",)))
    parser = build_part(host, "reasoning_parsers", Choice("harmony", {}), Resources(), path="reasoning_parser")
    assert isinstance(parser, ReasoningParser)
    return parser


def test_messages_of_a_channel_are_joined(harmony):
    """Each message is a line or more."""
    text = "<|end|><|start|>assistant".join(
        f"<|channel|>{channel}<|message|>{body}"
        for channel, body in [("analysis", "A"), ("commentary", "B"), ("analysis", "C"), ("final", "D")]
    )

    assert ("A\nC", "B\nD") == harmony.split(text)


@given(TURNS)
def test_settled_reasoning_only_grows(harmony, text):
    """Both parts begin those of the whole text."""
    before = ("", "")
    for cut in range(len(text) + 1):
        now = harmony.settled(text[:cut])
        assert all(part.startswith(earlier) for part, earlier in zip(now, before, strict=True))
        before = now
    assert all(whole.startswith(part) for whole, part in zip(harmony.split(text), before, strict=True))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>analysis<|message|>Easy. <|en", ("Easy. ", "")),
        ("<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>fin", ("Easy.", "")),
        ("<|channel|>final<|message|>It is", ("", "It is")),
        ("Plain", ("", "Plain")),
    ],
)
def test_parts_are_settled_while_they_come(harmony, text, expected):
    """Text is held back only where it may be a tag."""
    assert expected == harmony.settled(text)


def test_content_and_reasoning_of_a_turn_with_calls(harmony, parser_for, chat):
    """The gateway splits the content that the tool parser returns."""
    call = f"<|start|>assistant<|channel|>commentary to=functions.get json{BODY}"
    text = f"<|channel|>analysis<|message|>Easy.<|end|>{call}"

    content, calls = parser_for("gpt_oss").parse(np.array(chat.tokenizer.encode(text), np.int32))

    assert ("Easy.", "") == harmony.split(content)
    assert [("get", {"p": 1})] == good(calls)
