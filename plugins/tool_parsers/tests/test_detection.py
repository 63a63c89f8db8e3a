"""`auto` finds the format that a chat template writes, says why, and lists the candidates when it cannot tell."""

import importlib.util
from pathlib import Path

import pytest
import structlog

from turnwise import Resources
from turnwise.errors import ConfigError
from turnwise_chat_templates.template import ChatTemplate
from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_tool_parsers.detection import detect_format

FRAME = """\
<|im_start|>system
INSTRUCTIONS{{ tools | tojson }}<|im_end|>
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.tool_calls %}{% set content = '' %}\
{% set listed = namespace(calls=[]) %}{% for call in message.tool_calls %}\
{% set listed.calls = listed.calls + [dict(call.function, id=call.id)] %}{% endfor %}{% set calls = listed.calls %}\
TURN{% else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
PREFIX{% endif %}"""
INSTRUCTIONS = {"granite": "<|start_of_role|>", "granite4": "<|start_of_role|>"}
CHATML_SPECIALS = ("<|im_start|>", "<|im_end|>")
REAL = {
    "llama3_1": ("llama3_json", ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "llama3_2": ("llama3_json", ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "deepseekv3": ("deepseek_v3", ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")),
    "glm4moe": ("glm45", ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>")),
    "gptoss": ("gpt_oss", ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>")),
    "nemotron_3_nano": ("qwen3_coder", CHATML_SPECIALS),
    "qwen3_8": ("qwen3_coder", CHATML_SPECIALS),
    "qwen2_5": ("hermes", CHATML_SPECIALS),
    "qwen3": ("hermes", CHATML_SPECIALS),
}
THINKING = ("deepseekv3", "nemotron_3_nano", "qwen3_8")
"""Their prompts end with <think>."""


def chat_of(turn_template, instructions="", prefix=""):
    """Return a chat template with ChatML around calls of a format."""
    frame = FRAME.replace("INSTRUCTIONS", instructions).replace("PREFIX", prefix)
    return ChatTemplate(byte_tokenizer(frame.replace("TURN", turn_template)))


def test_every_format_is_found(turn, turn_templates, parser_names):
    """A template that writes a call in a format is found by this call."""
    template = turn_templates[turn].replace("{{ value | python }}", '"{{ value }}"')

    found = detect_format(chat_of(template, INSTRUCTIONS.get(turn, "")))

    assert parser_names.get(turn, turn) == found.grammar.name
    assert "it reads a call that the chat template wrote" == found.reason
    assert not found.starts_in_reasoning


@pytest.mark.parametrize("name", REAL)
def test_templates_of_real_models(name):
    """The templates that TRL ships are those of the models."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    expected, specials = REAL[name]
    source = (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")

    found = detect_format(ChatTemplate(byte_tokenizer(source, specials, bos_token=specials[0])))

    assert expected == found.grammar.name
    assert (name in THINKING) == found.starts_in_reasoning


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ("Prefix function calls with functools[...]", "phi4"),
        ("<|tool|>", "phi4"),
        ("<|start_of_role|>", "granite"),
        ("Use exact format: [func_name1(param1=value1)]", "llama4_pythonic"),
    ],
)
def test_instructions_count_when_a_template_shows_no_calls(instructions, expected):
    """The reason quotes them."""
    found = detect_format(chat_of("", instructions))

    assert expected == found.grammar.name
    assert "the chat template shows no calls, and its prompt contains" in found.reason


@pytest.mark.parametrize(
    ("template", "instructions", "text"),
    [
        ("", "", "shows no known format; set one of hermes, llama3_json, .*, phi4$"),
        ("", "<|tool|> <|start_of_role|>", "fits several formats; set one of granite, phi4$"),
        (
            '<|tool_call|>[{"name": "{{ calls[0].name }}", "arguments": {{ calls[0].arguments | tojson }}}]',
            "",
            "fits several formats; set one of granite, phi4$",
        ),
        ("{{ raise_exception('no calls') }}", "", "shows no known format"),
    ],
)
def test_an_unclear_template_is_refused(template, instructions, text):
    """The error lists the candidates."""
    with pytest.raises(ConfigError, match=f"auto cannot tell the format of tool calls, .* {text}"):
        detect_format(chat_of(template, instructions))


def test_auto_reads_calls_and_logs_its_choice(parser_for, render, turn_templates):
    """The turn may start inside reasoning, and the log names the parser and the reason."""
    chat = chat_of(turn_templates["granite4"], prefix="<think>")
    calls = [("add", {"a": 1}), ("sub", {"b": ["x"]})]
    text = render("granite4", "", calls)

    with structlog.testing.capture_logs() as logs:
        parser = parser_for("auto", Resources(chat=chat))

    assert calls == [(call.name, call.arguments) for call in parser.parse_text(f"Hm: {text}</think>{text}")[1]]
    assert [("info", "tool parser chosen", "hermes", True)] == [
        (log["log_level"], log["event"], log["parser"], log["starts_in_reasoning"]) for log in logs
    ]
    assert "it reads a call" in logs[0]["reason"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('<tool_call>{"name": "a", "arguments": {}} x</tool_call>', "there is text after its JSON"),
        ("<tool_call>x</tool_call>", "it is not valid JSON"),
        ("<tool_call>{}", "its closing tag is missing"),
    ],
)
def test_malformed_hermes_calls(parser_for, turn_templates, text, why):
    """`auto` reports them as other formats do."""
    parser = parser_for("auto", Resources(chat=chat_of(turn_templates["granite4"])))

    assert why in parser.parse_text(text)[1][0].error


def test_auto_knows_formats_without_tags_of_reasoning(parser_for, render, turn_templates):
    """gpt-oss has a channel for it."""
    parser = parser_for("auto", Resources(chat=chat_of(turn_templates["gpt_oss"])))

    assert [{"a": 1}] == [call.arguments for call in parser.parse_text(render("gpt_oss", "", [("f", {"a": 1})]))[1]]


def test_auto_needs_a_chat_template(parser_for):
    """The error says that the run needs a model directory."""
    with pytest.raises(ConfigError, match="tool parser 'auto' reads a chat template"):
        parser_for("auto", Resources(seed=1))
