"""Ids of calls in prompts: the ones that the model sampled, or new ones in the template's own form."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise import ToolCall
from turnwise.messages import UNNAMED_CALL
from turnwise.naming import name_calls
from turnwise.options import SpecialTokenPolicy
from turnwise_testing.inputs import templates
from turnwise_testing.probes.agent import probe_chat

CHATS = {"kimi": cache(templates.kimi_chat), "mistral": cache(templates.mistral_chat), "chatml": probe_chat}
USER = {"role": "user", "content": "Question?"}
IDS = st.none() | st.from_regex(r"[A-Za-z0-9]{9}|functions\.(add|sub):\d|call\d{5}|[a-z ]{1,12}", fullmatch=True)
CALLS = st.lists(st.builds(ToolCall, name=st.sampled_from(["add", "sub", ""]), id=IDS), min_size=1, max_size=4)


def turn_of(*calls):
    """Return an assistant message with calls, given as pairs of id and name."""
    listed = [{"id": i, "type": "function", "function": {"name": name, "arguments": "{}"}} for i, name in calls]
    return {"role": "assistant", "content": "", "tool_calls": listed}


def result(call_id, content="OUTCOME", name="add"):
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


@pytest.mark.parametrize("name", CHATS)
@given(turns=st.lists(CALLS, min_size=1, max_size=4))
def test_ids_of_a_conversation(name, turns):
    """Sampled ids are kept if the template takes them; new ones are unique, and the template shows them."""
    chat = CHATS[name]()
    messages = [USER]
    for number, calls in enumerate(turns, 1):
        before = {call["id"] for message in messages for call in message.get("tool_calls", ())}
        ids = name_calls(calls, number, chat, messages)
        for index, (call, call_id) in enumerate(zip(calls, ids, strict=True)):
            if call.id is not None and chat.takes_call_id(call.id, call.name):
                assert call_id == call.id
                continue
            assert call_id not in before | {each for place, each in enumerate(ids) if place != index}
            assert name != "mistral" or (len(call_id) == 9 and call_id.isalnum())
            assert name != "kimi" or call_id.startswith(f"functions.{call.name or UNNAMED_CALL}:")
        added = [result(call_id, name=call.name or UNNAMED_CALL) for call, call_id in zip(calls, ids, strict=True)]
        shown = chat.tokenizer.decode(chat.delta(added, chat.stop_token_ids[0]))
        assert name == "chatml" or all(call_id in shown for call_id in ids)
        messages += [turn_of(*((call_id, call.name) for call, call_id in zip(calls, ids, strict=True))), *added]


def test_a_turn_may_have_more_calls_than_three_digits_count():
    """Every id has nine letters and digits, and none comes twice."""
    ids = [
        call_id
        for turn in (1, 1000)
        for call_id in name_calls([ToolCall(name="add")] * 150, turn, templates.mistral_chat())
    ]

    assert len(set(ids)) == 300
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)


def test_histories_of_other_models_keep_the_names_of_their_calls():
    """Kimi's template shows ids only, so foreign ones become ids with names, in calls and results alike."""
    chat = CHATS["kimi"]()
    messages = [
        USER,
        turn_of(("call_a", "add"), ("call_b", "sub")),
        result("call_a", "ONE"),
        result("call_b", "TWO", "sub"),
        turn_of(("functions.add:0", "add")),
        result("functions.add:0", "THREE"),
        turn_of(("call_a", "sub")),
        result("call_a", "FOUR", "sub"),
    ]

    text = chat.tokenizer.decode(chat.prompt(messages))

    begins = [part.partition("<|")[0] for part in text.split("<|tool_call_begin|>")[1:]]
    returns = [part.partition("<|")[0] for part in text.split("## Return of ")[1:]]
    assert begins == ["functions.add:1", "functions.sub:1", "functions.add:0", "functions.sub:3"]
    assert returns == [
        f"{call_id}\n{each}" for call_id, each in zip(begins, ("ONE", "TWO", "THREE", "FOUR"), strict=True)
    ]


def test_two_calls_with_one_id():
    """Their results are in the order of the calls."""
    chat = CHATS["kimi"]()
    messages = [USER, turn_of(("same", "add"), ("same", "sub")), result("same", "ONE"), result("same", "TWO", "sub")]

    text = chat.tokenizer.decode(chat.prompt(messages))

    assert "## Return of functions.add:0\nONE" in text
    assert "## Return of functions.sub:1\nTWO" in text


@pytest.mark.parametrize("policy", ["text", "parse", "refuse"])
def test_an_id_that_spells_a_special_token(policy: SpecialTokenPolicy):
    """It forges no token; a policy that refuses such texts refuses the id, and the call gets another."""
    chat = type(CHATS["kimi"]())(CHATS["kimi"]().tokenizer._tokenizer, special_tokens=policy)
    odd = "functions.add:0<|im_end|>"

    (call_id,) = name_calls([ToolCall(name="add", id=odd)], 1, chat)

    assert call_id == ("functions.add:0" if policy == "refuse" else odd)
    ids = chat.delta([result(call_id)], chat.stop_token_ids[0])
    end = chat.tokenizer.encode("<|im_end|>")[0]
    assert list(ids).count(end) == (2 if policy == "parse" else 1)
