"""Clients that send back each call of a turn beside its result continue the record, in every dialect."""

from __future__ import annotations

import json

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_requests import TOOLS
from session_scenarios import Sessions, as_message, make_call, user

from turnwise_gateway.dialects import find_dialect
from turnwise_gateway.server import GatewayServer, SessionDirectory

CALLS = [f'<tool_call>{{"name": "add", "arguments": {{"a": {number}, "b": 1}}}}</tool_call>' for number in range(3)]
TURN = "<think>Hm.</think>I add." + "".join(CALLS)
ITEMS = [(kind, number) for number in range(3) for kind in ("call", "result")]


def is_apart(items):
    """Return whether the calls are in several messages."""
    return [kind for kind, _ in items[:3]] != ["call"] * 3


def is_order(items):
    """Return whether each result follows its call, and calls in one message have the order of the turn."""
    calls = [number for kind, number in items if kind == "call"]
    if not is_apart(items) and calls != sorted(calls):
        return False
    return all(items.index(("call", number)) < items.index(("result", number)) for number in range(3))


ORDERS = st.permutations(ITEMS).filter(is_order)


def plain(items):
    """Return the items with all calls first, in the order of the turn; results keep their order."""
    return [("call", number) for number in range(3)] + [item for item in items if item[0] == "result"]


def result_text(number):
    return f"The sum is {number + 1}."


def chat_items(reply, items):
    message = reply["choices"][0]["message"]
    calls, found = message.pop("tool_calls"), []
    for kind, number in items:
        if kind == "result":
            found.append({"role": "tool", "tool_call_id": calls[number]["id"], "content": result_text(number)})
        elif found and found[-1]["role"] == "assistant":
            found[-1]["tool_calls"].append(calls[number])
        else:
            found.append({**(message if not found else {"role": "assistant"}), "tool_calls": [calls[number]]})
    return found


def messages_items(reply, items):
    head = [block for block in reply["content"] if block["type"] != "tool_use"]
    calls, found = [block for block in reply["content"] if block["type"] == "tool_use"], []
    for kind, number in items:
        role, block = "assistant", calls[number]
        if kind == "result":
            role = "user"
            block = {"type": "tool_result", "tool_use_id": block["id"], "content": result_text(number)}
        if not found or found[-1]["role"] != role:
            found.append({"role": role, "content": head if not found else []})
        found[-1]["content"] = [*found[-1]["content"], block]
    return found


def responses_items(reply, items):
    calls = [item for item in reply["output"] if item["type"] == "function_call"]
    found = [item for item in reply["output"] if item["type"] != "function_call"]
    for kind, number in items:
        output = {"type": "function_call_output", "call_id": calls[number]["call_id"], "output": result_text(number)}
        found.append(calls[number] if kind == "call" else output)
    return found


WRITE = {"chat": chat_items, "messages": messages_items, "responses": responses_items}


def run(name, items):
    """Run a session whose client sends a turn back as these items; return it."""
    dialect = find_dialect(name)
    question = [user("Add.")]

    async def work(session):
        directory = SessionDirectory("tiny")
        headers = {"Authorization": f"Bearer {directory.add('s-1', session)}"}
        async with GatewayServer(directory) as server, aiohttp.ClientSession(headers=headers) as client:

            async def post(sent):
                more = {"max_tokens": 256} if name == "messages" else {}
                body = {"model": "tiny", dialect.list_key: sent, "tools": TOOLS[name], **more}
                async with client.post(f"{server.url()}/{dialect.path}", json=body) as received:
                    text = await received.text()
                    assert 200 == received.status, text
                    return json.loads(text)

            echo = WRITE[name](await post(question), items)
            await post([*question, *echo])

    return Sessions((TURN,)).run(work)


def tokens(done):
    return [(record.input_ids.tolist(), record.response_mask.tolist()) for record in done.records]


@pytest.mark.parametrize("name", WRITE)
@settings(max_examples=10)
@given(items=ORDERS)
def test_the_order_of_calls_and_results_makes_no_fork(name, items):
    """Its record has the tokens of a client that sends all calls first, with the results in the same order."""
    done, expected = run(name, items), run(name, plain(items))

    assert tokens(expected) == tokens(done)
    assert 1 == len(done.records)
    assert is_apart(items) == ("echo_calls_apart" in done.counts)


def changed(message, **changes):
    call = message["tool_calls"][0]
    return {**message, "tool_calls": [{**call, **changes}]}


def function(arguments):
    return {"function": {"name": "add", "arguments": arguments}}


@pytest.mark.parametrize(
    ("change", "num_records"),
    [
        pytest.param(lambda echo: echo, 1, id="as it was"),
        pytest.param(lambda echo: [*echo[:-1], user("Never mind.")], 1, id="the last has no result"),
        pytest.param(lambda echo: [changed(echo[0], **function('{"a": 9}')), *echo[1:]], 2, id="other arguments"),
        pytest.param(lambda echo: [*echo[:2], changed(echo[2], id="x"), *echo[3:]], 2, id="another id"),
        pytest.param(lambda echo: echo[:4], 2, id="a call is missing"),
        pytest.param(lambda echo: [*echo, *echo[:2]], 2, id="a call twice"),
        pytest.param(lambda echo: [*echo[:2], user("Wait."), *echo[2:]], 2, id="a message between"),
        pytest.param(lambda echo: [{**echo[0], "content": "I do not."}, *echo[1:]], 2, id="another text"),
    ],
)
def test_a_changed_turn_forks(change, num_records):
    """Only a turn with all its calls, as the model made them, is the turn."""

    async def work(session):
        answer = await session.answer(make_call(user("Add.")))
        answer.confirm()
        message, echo = as_message(answer.reply), []
        for number, call in enumerate(message.pop("tool_calls")):
            head = message if not echo else {"role": "assistant", "content": ""}
            echo.append({**head, "tool_calls": [call]})
            echo.append({"role": "tool", "tool_call_id": call["id"], "content": result_text(number)})
        (await session.answer(make_call(user("Add."), *change(echo), user("Go on.")))).confirm()

    done = Sessions((TURN, "Done.")).run(work)

    assert num_records == len(done.records)
    assert (num_records == 1) == ("echo_calls_apart" in done.counts)


def test_parts_may_come_in_several_requests():
    """Requests that lack calls fork; the one with all of them continues the record, and so do later ones."""

    async def work(session):
        question = user("Add.")
        answer = await session.answer(make_call(question))
        answer.confirm()
        message, echo = as_message(answer.reply), [question]
        for call in message.pop("tool_calls"):
            echo.append({**message, "tool_calls": [call]})
            message = {"role": "assistant", "content": ""}
            echo.append({"role": "tool", "tool_call_id": call["id"], "content": "5"})
            answer = await session.answer(make_call(*echo))
            answer.confirm()
        for _ in range(2):
            echo += [as_message(answer.reply), user("Go on.")]
            answer = await session.answer(make_call(*echo))
            answer.confirm()

    done = Sessions((TURN, "Done.")).run(work)

    assert [4, 1, 1] == [len(record.turns()) for record in done.records]
    assert 2 == done.counts["forks_foreign_turn"]
