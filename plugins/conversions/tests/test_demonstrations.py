"""Conversations as demonstrations, with templates that rewrite earlier turns."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import DataError
from turnwise_chat_templates.template import ChatTemplate
from turnwise_conversions import encode_demonstration
from turnwise_testing.inputs.tokenizers import CHATML, byte_tokenizer

THINKING = """\
{%- set ns = namespace(query=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- set content, reasoning = message.content or '', '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.index0 > ns.query and (loop.last or reasoning) %}
        {{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Drops the reasoning of the turns before the last question, and adds an empty one to a last turn, as Qwen3's does."""

CHATS = {"chatml": ChatTemplate(byte_tokenizer(CHATML)), "thinking": ChatTemplate(byte_tokenizer(THINKING))}
WORDS = st.text(st.characters(exclude_characters="<>", exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda text: text == text.strip()
)
TURNS = st.builds(
    lambda reasoning, text: f"<think>\n{reasoning}\n</think>\n\n{text}" if reasoning else text,
    WORDS | st.just(""),
    WORDS,
)
ANSWERS = st.tuples(st.sampled_from(["user", "tool"]), WORDS)


def sampled(chat, question, turns, answers):
    """Return the messages, the ids and the mask of an episode, appended as an agent does."""
    messages = [{"role": "user", "content": question}]
    ids, mask = chat.prompt(messages).tolist(), []
    mask += [0] * len(ids)
    for text, answer in zip(turns, [*answers, None], strict=True):
        turn = [*chat.tokenizer.encode(text), chat.stop_token_ids[0]]
        messages.append({"role": "assistant", "content": text})
        ids, mask = ids + turn, mask + [1] * len(turn)
        if answer is not None:
            new = [{"role": answer[0], "content": answer[1], "tool_call_id": "0", "name": "f"}]
            delta = chat.delta(new, ids[-1], with_tools=False).tolist()
            messages, ids, mask = messages + new, ids + delta, mask + [0] * len(delta)
    return messages, ids, mask


@pytest.mark.parametrize("name", CHATS)
@given(data=st.data())
def test_a_sampled_conversation_is_its_own_demonstration(name, data):
    """Ids and mask are those of the episode, also where the template drops reasoning from the history."""
    turns = data.draw(st.lists(TURNS, min_size=1, max_size=3))
    answers = data.draw(st.lists(ANSWERS, min_size=len(turns) - 1, max_size=len(turns) - 1))
    messages, ids, mask = sampled(CHATS[name], data.draw(WORDS), turns, answers)

    made = encode_demonstration(CHATS[name], messages)

    assert made.input_ids.tolist() == ids
    assert np.array_equal(made.loss_mask, np.array(mask, bool))


def test_a_turn_that_the_template_changes_is_refused():
    """A demonstration never lacks a part of the conversation that it was made of."""
    messages = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "<think>easy</think>5"}]

    with pytest.raises(DataError, match="message 1: the chat template does not write this turn"):
        encode_demonstration(CHATS["thinking"], messages)
    with pytest.raises(DataError, match="message 1: the chat template does not write this turn"):
        encode_demonstration(CHATS["chatml"], [messages[0], {**messages[1], "reasoning_content": "two and three"}])
