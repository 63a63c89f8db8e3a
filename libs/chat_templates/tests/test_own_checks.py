"""A template's own checks of contents hold, whatever the policy for special tokens is."""

import re

import pytest
from real_templates import SPECIAL, TEMPLATES, tokenizer_of

from turnwise.errors import TemplateError
from turnwise_chat_templates.template import ChatTemplate

OWN = """\
{%- for message in messages -%}
{%- if '<|im_start|>' in message.content -%}{{ raise_exception('no <|im_start|> in a ' + message.role) }}{%- endif -%}
<|im_start|>{{ message.role }}
{{ message.content | trim }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
REFUSING = ("own", "gptoss", "gptoss_training")
CHECK = re.compile(r"""["'](<\|[^"']+)["'] in """)
USER = {"role": "user", "content": "Question?"}


def sources():
    """Yield the name and the source of each template that looks for its tokens in contents."""
    yield "own", OWN
    for path in sorted(TEMPLATES.glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        if CHECK.search(source):
            yield path.stem, source


SOURCES = dict(sources())


def outcome(chat, messages):
    """Return the template's refusal, and an empty text for a prompt."""
    try:
        chat.prompt(messages)
    except TemplateError as error:
        return str(error)
    return ""


@pytest.mark.many_cases(5)
@pytest.mark.parametrize("name", SOURCES)
def test_contents_that_a_template_refuses(name):
    """Each of its tokens, and each text that it looks for, in each message: the same refusals as without a guard."""
    source = SOURCES[name]
    guarded, parsing = (ChatTemplate(tokenizer_of(source), special_tokens=each) for each in ("text", "parse"))
    texts = sorted({*SPECIAL.findall(source), *CHECK.findall(source)})
    refused = 0
    for text in texts:
        conversations = [
            [{**USER, "content": f"a {text} b"}],
            [USER, {"role": "assistant", "content": f"a {text} b"}, USER],
            [USER, {"role": "assistant", "content": "", "thinking": f"a {text} b"}, USER],
            [USER, {"role": "assistant", "content": "a", "reasoning_content": f"a {text} b"}, USER],
        ]
        for messages in conversations:
            expected = outcome(parsing, messages)
            refused += bool(expected)
            assert outcome(guarded, messages) == expected
    assert refused or name not in REFUSING


def test_new_messages_that_a_template_refuses():
    """Appended messages are checked as those of a prompt are."""
    for policy in ("text", "parse"):
        chat = ChatTemplate(tokenizer_of(OWN), special_tokens=policy)
        with pytest.raises(TemplateError, match="in a user"):
            chat.delta([{"role": "user", "content": "<|im_start|>"}], chat.stop_token_ids[0])


@pytest.mark.parametrize("key", ["thinking", "reasoning_content", "reasoning"])
def test_reasoning_has_the_name_of_the_template(key):
    """gpt-oss calls it `thinking`; clients have two more names."""
    chat = ChatTemplate(tokenizer_of((TEMPLATES / "gptoss.jinja").read_text(encoding="utf-8")))
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call], key: "Easy."}

    result = {"role": "tool", "tool_call_id": "a", "name": "add", "content": "3"}
    text = chat.tokenizer.decode(chat.prompt([USER, turn, result]))

    assert "<|channel|>analysis<|message|>Easy.<|end|>" in text


def test_reasoning_beside_content_and_calls():
    """gpt-oss refuses both, so the content is shown."""
    chat = ChatTemplate(tokenizer_of((TEMPLATES / "gptoss.jinja").read_text(encoding="utf-8")))
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "I add.", "tool_calls": [call], "reasoning_content": "Easy."}

    result = {"role": "tool", "tool_call_id": "a", "name": "add", "content": "3"}
    text = chat.tokenizer.decode(chat.prompt([USER, turn, result]))

    assert "I add." in text
