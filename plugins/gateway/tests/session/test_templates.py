"""Conversations with the chat template of each model family that the installed `trl` ships."""

from __future__ import annotations

import importlib.util
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from random_agents import ACTIONS, RandomAgent, check_trained_once
from session_scenarios import ADD, TURNS, Sessions, as_message, make_call, results_of, user

from turnwise import Status
from turnwise.errors import TemplateError
from turnwise.record.columns import Origin
from turnwise_chat_templates.template import ChatTemplate
from turnwise_gateway.refusal import CallRefusedError
from turnwise_testing.inputs.tokenizers import byte_tokenizer

NUM_TURNS = 6
_SPEC = importlib.util.find_spec("trl")
FOLDER = Path(_SPEC.origin).parent / "chat_templates" if _SPEC and _SPEC.origin else Path("missing")
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
SPECIAL = re.compile(
    r'<\|"\|>|<\|[A-Za-z_]+\|?>|<[a-z_]+\|>|<\uff5c[^\uff5c]+\uff5c>|<(?:start|end)_of_[a-z]+>|\[gMASK\]|<sop>'
)
"""Tokens of the templates' real tokenizers."""
SEEDS = st.integers(0, 2**32)
PLANS = st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=10)


@cache
def chat_of(name: str) -> ChatTemplate | None:
    """Return a chat template; None for one that can append nothing."""
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    special = sorted(set(SPECIAL.findall(source)))
    try:
        return ChatTemplate(byte_tokenizer(source, special, bos_token="<bos>", eos_token="<eos>"), name=name)
    except TemplateError:
        return None


def appends(chat: ChatTemplate, *messages: dict[str, Any]) -> bool:
    """Return whether messages can be appended to a conversation with tools."""
    try:
        chat.delta(messages, chat.stop_token_ids[0])
    except TemplateError:
        return False
    return True


def appends_results(chat: ChatTemplate, *others: dict[str, Any]) -> bool:
    """Return whether one result and two can be appended, with other messages behind them."""
    result = {"role": "tool", "name": "add", "tool_call_id": "abcdefgh0", "content": "5"}
    return appends(chat, result, *others) and appends(chat, result, {**result, "tool_call_id": "abcdefgh1"}, *others)


def shows_tools(chat: ChatTemplate) -> bool:
    """Return whether a prompt with a tool has its name."""
    try:
        return "add" in chat.tokenizer.decode(chat.prompt([user("Go on.")], [ADD]))
    except TemplateError:
        return False


def check_conversation(chat: ChatTemplate, tools: tuple[Any, ...], turns: tuple[str, ...]) -> None:
    """Hold a conversation; the context of each turn begins with the ids of the turn before, in one record."""
    replies = []

    async def converse(session: Any) -> None:
        messages, before = [user("Question 0?")], []
        for _ in range(NUM_TURNS):
            answer = await session.answer(make_call(*messages, tools=tools))
            reply = answer.reply
            context = session.book.records[reply.provenance["record"]].trajectory.input_ids.tolist()
            assert reply.usage.prompt_tokens == len(context)
            assert before == context[: len(before)]
            answer.confirm()
            replies.append(reply)
            before = [*context, *reply.token_ids.tolist()]
            messages += [as_message(reply, reasoning=False), *(results_of(reply) or [user("Go on.")])]

    done = Sessions(turns=turns, chat=chat).run(converse)

    (record,) = done.records
    assert NUM_TURNS == len(record.turns()) == len(replies)
    sampled = [token_id for reply in replies for token_id in reply.token_ids.tolist()]
    assert sampled == record.response_ids[record.origins == Origin.ACTION].tolist()


@pytest.mark.many_cases
@pytest.mark.skipif(not FOLDER.is_dir(), reason="trl is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_a_context_begins_with_the_turn_before(name: str) -> None:
    """Every template that can append the messages keeps a conversation in one record, without a tool and with one."""
    chat = chat_of(name)
    can_append = chat is not None and appends(chat, user("Go on."))
    assert can_append or name.startswith(("idefics", "llava", "smolvlm"))  # for messages with images
    if chat is None:
        return
    check_conversation(chat, (), ("It is 42.", "I think so.\n", "Grüße, 世界: no call here."))
    if not shows_tools(chat):  # the model would never call one
        with pytest.raises(CallRefusedError, match="tools are not shown"):
            check_conversation(chat, (ADD,), TURNS[:4])
    elif appends_results(chat):
        check_conversation(chat, (ADD,), TURNS[:4])


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason="trl is not installed")
@settings(max_examples=30)
@given(name=st.sampled_from(NAMES or [""]), seed=SEEDS, actions=PLANS)
# Two conversations with equal turns, of which one has an empty message: the ids of its calls tell them apart.
@example(name="lfm2_2_5", seed=7021796, actions=["empty", *5 * ["continue"]])
def test_random_agents_with_other_templates(name: str, seed: int, actions: list[str]) -> None:
    """Each delivered token is trained once with every template that can append what such an agent sends."""
    chat = chat_of(name)
    question = user("Go on.")
    assume(chat is not None and appends_results(chat) and appends_results(chat, question))
    assume(appends(chat, question, question) and shows_tools(chat))
    # A template may refuse a whole conversation with an edited turn, for example one with several calls.
    agent = RandomAgent(random.Random(seed), actions, refusals=("context_length_exceeded", "invalid"))

    done = Sessions(turns=TURNS[:4], chat=chat).run(agent.run)

    assert done.result.status in (Status.COMPLETED, Status.TRUNCATED)
    check_trained_once(done, agent)
