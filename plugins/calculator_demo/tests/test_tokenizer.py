"""The tokenizer and the chat template of the shipped model."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from turnwise_calculator_demo import model_dir
from turnwise_calculator_demo.encoding import EpisodeEncoder
from turnwise_calculator_demo.episodes import TOOL_SCHEMA, call_text
from turnwise_calculator_demo.train import TAGS, TrainConfig, build_training
from turnwise_tiny_models import END_OF_TEXT, TURN_END, TURN_START

TOKENIZER = PreTrainedTokenizerFast.from_pretrained(model_dir())
MARKED = st.text() | st.sampled_from([*TAGS, TURN_START, TURN_END, END_OF_TEXT])
CONTENTS = st.text(st.characters(exclude_categories=["Cs"]))


def call(expression: str) -> dict[str, Any]:
    """Return a tool call in OpenAI's format."""
    return {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}


MESSAGES = st.one_of(
    st.builds(lambda text: [{"role": "user", "content": text}], CONTENTS),
    st.builds(lambda text: [{"role": "system", "content": text}], CONTENTS),
    st.builds(lambda text: [{"role": "assistant", "content": text}], CONTENTS),
    st.builds(
        lambda text, num: [
            {"role": "assistant", "content": text, "tool_calls": [call(f"{i} + 1") for i in range(num)]},
            *({"role": "tool", "content": f"{text}{i}"} for i in range(num)),
        ],
        CONTENTS,
        st.integers(1, 3),
    ),
)
"""Groups of messages: one message, or a turn with calls and all its tool messages."""


def rendered(messages: list[dict[str, Any]], tools: bool = True, prompt: bool = False) -> str:
    """Return a conversation as text."""
    schemas = [TOOL_SCHEMA] if tools else None
    text = TOKENIZER.apply_chat_template(messages, tools=schemas, add_generation_prompt=prompt, tokenize=False)
    assert isinstance(text, str)
    return text


@given(st.lists(MARKED).map("".join))
def test_any_text_survives(text: str) -> None:
    """Encoding and decoding are lossless, also for tags and special tokens in the text."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert text == TOKENIZER.decode(ids, skip_special_tokens=False)


@given(st.integers(min_value=0), st.text())
def test_every_digit_is_one_token(number: int, text: str) -> None:
    """Every digit is one token, the same in every context."""
    digit_ids = [TOKENIZER.encode(d, add_special_tokens=False)[0] for d in "0123456789"]
    ids = TOKENIZER.encode(f"{text}{number}{text}", add_special_tokens=False)
    expected = [digit_ids[int(d)] for d in f"{text}{number}{text}" if d in "0123456789"]
    assert expected == [token for token in ids if token in digit_ids]
    assert not any(len(token) > 1 and set(token) & set("0123456789") for token in TOKENIZER.get_vocab())


def test_special_tokens() -> None:
    """There are three special tokens; the tags are tokens that decoding keeps."""
    assert TOKENIZER.eos_token == TURN_END
    assert TOKENIZER.pad_token == END_OF_TEXT
    for token in (*TAGS, TURN_START, TURN_END, END_OF_TEXT):
        assert len(TOKENIZER.encode(token, add_special_tokens=False)) == 1
    text = "".join([TURN_START, *TAGS, TURN_END, END_OF_TEXT])
    assert "".join(TAGS) == TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=True)


def test_encoding_adds_nothing() -> None:
    """Encoding adds no token before or after a text."""
    assert TOKENIZER.encode("What is 5?") == TOKENIZER.encode("What is 5?", add_special_tokens=False)


def test_a_whole_conversation() -> None:
    """A prompt, a call, a tool message and an answer render to the exact expected text."""
    messages = [
        {"role": "user", "content": "What is 23 + 48?"},
        {"role": "assistant", "content": "", "tool_calls": [call("23 + 48")]},
        {"role": "tool", "content": "71"},
        {"role": "assistant", "content": "The answer is 71."},
    ]
    expected = (
        "<|im_start|>system\nTools: calculator(expression)<|im_end|>\n"
        "<|im_start|>user\nWhat is 23 + 48?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "23 + 48"}}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n71\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nThe answer is 71.<|im_end|>\n"
    )
    assert expected == rendered(messages)
    assert expected + "<|im_start|>assistant\n" == rendered(messages, prompt=True)


def test_tool_calls_render_as_they_are_written() -> None:
    """Calls as objects, as strings and as raw text render to the same text, also several in a turn."""
    as_object = {"role": "assistant", "content": None, "tool_calls": [call("1 + 2"), call("3 * 4")]}
    plain = {"name": "calculator", "arguments": '{"expression": "1 + 2"}'}
    as_string = {"role": "assistant", "content": "", "tool_calls": [plain, {"function": call("3 * 4")["function"]}]}
    as_text = {"role": "assistant", "content": call_text("1 + 2") + "\n" + call_text("3 * 4")}
    assert rendered([as_text]) == rendered([as_object]) == rendered([as_string])


def test_consecutive_tool_messages_share_a_turn() -> None:
    """Consecutive tool messages render as one user turn, as in Qwen's template."""
    messages = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    expected = (
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )
    assert expected == rendered(messages, tools=False)


def test_a_system_message_and_the_tools_share_a_turn() -> None:
    """The system turn has the system message and then the tools; without both it is omitted."""
    messages = [{"role": "system", "content": "Be brief."}]
    assert rendered(messages) == "<|im_start|>system\nBe brief.\n\nTools: calculator(expression)<|im_end|>\n"
    assert rendered(messages, tools=False) == "<|im_start|>system\nBe brief.<|im_end|>\n"
    question = [{"role": "user", "content": "Hello"}]
    assert rendered(question, tools=False) == "<|im_start|>user\nHello<|im_end|>\n"


@given(st.lists(MESSAGES, min_size=1, max_size=5), st.booleans())
def test_appending_messages_appends_text(groups: list[list[dict[str, Any]]], tools: bool) -> None:
    """A message does not change the text before it, and an assistant turn continues the generation prompt."""
    messages = [message for group in groups for message in group]
    whole = rendered(messages, tools)
    for cut in range(1, len(groups)):
        before = [message for group in groups[:cut] for message in group]
        assert whole.startswith(rendered(before, tools))
        if groups[cut][0]["role"] == "assistant":
            assert whole.startswith(rendered(before, tools, prompt=True))


@given(CONTENTS.filter(lambda text: "\x00" not in text), CONTENTS.filter(lambda text: "\x00" not in text))
def test_the_encoder_agrees_with_the_template(question: str, response: str) -> None:
    """Parts encoded one by one decode to the rendered conversation."""
    encoder = EpisodeEncoder(TOKENIZER)
    ids = encoder.prompt(question) + encoder.action(call_text("1 + 2")) + encoder.observation(response)
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call("1 + 2")]},
        {"role": "tool", "content": response},
    ]
    assert rendered(messages, prompt=True) == TOKENIZER.decode(ids, skip_special_tokens=False)


def test_an_unknown_role_is_an_error() -> None:
    """An unknown role raises an error that names it."""
    with pytest.raises(Exception, match="unknown role narrator"):
        rendered([{"role": "narrator", "content": "Once"}])


def test_training_builds_the_shipped_tokenizer() -> None:
    """Training builds the same vocabulary, merges and template as the shipped ones."""
    made = build_training(TrainConfig()).tokenizer
    assert made.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()
    assert made.chat_template == TOKENIZER.chat_template
