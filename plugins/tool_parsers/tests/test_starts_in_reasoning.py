"""A turn whose prompt has opened the reasoning starts inside it, however the parser was chosen."""

import importlib.util
from pathlib import Path

import pytest
import structlog
from test_detection import CHATML_SPECIALS, REAL, THINKING, chat_of

from turnwise import Resources
from turnwise_chat_templates.template import ChatTemplate
from turnwise_testing.inputs.tokenizers import byte_tokenizer

CALL = ("add", {"a": 1})
PREFIXES = ["<think>", "<think>\n", "\n<think>\n\n", "<think>\nOkay,", "<think></think><think>"]
CLOSED = ["", "\n", "<think>\n\n</think>\n\n", "</think>", "Hm."]


def good(calls):
    return [(call.name, call.arguments) for call in calls if not call.error]


def tags_of(turn, text):
    """Return a text with the tags of reasoning that the parser of a renderer knows."""
    return text.replace("<think>", "[THINK]").replace("</think>", "[/THINK]") if turn[:7] == "mistral" else text


@pytest.mark.many_cases
@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_prompt_may_open_reasoning(turn, render, parser_for, resources_of, turn_templates, prefix):
    """Calls before the closing tag do not run."""
    if turn.startswith("gpt_oss"):
        pytest.skip("gpt-oss has a channel for reasoning")
    chat = chat_of(turn_templates[turn].replace("| python", "| tojson"), prefix=tags_of(turn, prefix))
    call = render(turn, "", [CALL])
    parser = parser_for(turn, Resources(chat=chat, tools=resources_of(CALL).tools))
    draft = tags_of(turn, f"Perhaps {call} but no.\n</think>\n\n")

    assert (f"{draft}Done.", ()) == parser.parse_text(f"{draft}Done.")
    assert [CALL] == good(parser.parse_text(draft + call)[1])
    assert len("Perhaps ") + 4 == parser.settled(f"Perhaps {call}"[: len("Perhaps ") + 4])


@pytest.mark.many_cases
@pytest.mark.parametrize("prefix", CLOSED)
def test_a_prompt_without_open_reasoning(turn, render, parser_for, resources_of, turn_templates, prefix):
    """The turn starts with text or calls."""
    chat = chat_of(turn_templates[turn].replace("| python", "| tojson"), prefix=tags_of(turn, prefix))
    parser = parser_for(turn, Resources(chat=chat, tools=resources_of(CALL).tools))

    assert [CALL] == good(parser.parse_text(render(turn, "", [CALL]))[1])


@pytest.mark.parametrize("name", REAL)
def test_a_named_parser_reads_as_auto(name, parser_for):
    """The templates of models give the same result for both."""
    spec = importlib.util.find_spec("trl")
    source = (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    expected, specials = REAL[name]
    resources = Resources(chat=ChatTemplate(byte_tokenizer(source, specials, bos_token=specials[0])))

    named, auto = parser_for(expected, resources), parser_for("auto", resources)

    assert (name in THINKING) == named.starts_in_reasoning == auto.starts_in_reasoning


def test_an_option_that_contradicts_the_prompt_is_kept_and_reported(parser_for, turn_templates, render):
    """The log names the option."""
    chat = chat_of(turn_templates["qwen3_coder"], prefix="<think>\n")

    with structlog.testing.capture_logs() as logs:
        parser = parser_for("qwen3_coder", Resources(chat=chat), starts_in_reasoning=False)

    assert [CALL[0]] == [call.name for call in parser.parse_text(render("qwen3_coder", "", [CALL]))[1]]
    assert [("warning", "reasoning of the prompt is ignored", "qwen3_coder")] == [
        (log["log_level"], log["event"], log["parser"]) for log in logs
    ]


def test_a_question_is_no_prefix(parser_for, turn_templates, render):
    """Tags before the model's turn, as in a system message, open no reasoning."""
    chat = chat_of(turn_templates["hermes"], instructions="Reason after <think>. ")

    assert not parser_for("hermes", Resources(chat=chat)).starts_in_reasoning


def test_a_template_that_refuses_the_question(parser_for):
    """The parser is built, and the turn starts with text."""
    source = (
        "{% if messages[0].content == 'Say a word.' %}{{ raise_exception('no') }}{% endif %}"
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
    )
    chat = ChatTemplate(byte_tokenizer(source, CHATML_SPECIALS))

    assert not parser_for("hermes", Resources(chat=chat)).starts_in_reasoning
