"""A conversation of Responses gives one record, whether its items are sent, named, or continued by a response's id."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
from hypothesis import example, given, settings
from hypothesis import strategies as st
from session_scenarios import ADD, Sessions

from turnwise_gateway.server import GatewayServer, SessionDirectory

TURNS = (
    "<think>\nI must add.\n</think>\nFirst I add.\n"
    '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1.0}}\n</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {"a": 5, "b": 8}}</tool_call>',
    "<think>Nothing to add.</think>Grüße, 世界: no call here.",
    "The answer is 42.",
)
TOOLS = [{"type": "function", **ADD["function"]}]
NUM_TURNS = 5
Mode = tuple[int, int]
"""Number of turns after the response that a request continues, or more for none; bits of the items that it names."""


async def converse(url: str, key: str, modes: list[Mode], *, stream: bool) -> None:
    """Hold a conversation; each request sends it in another way."""
    items: list[Any] = [{"role": "user", "content": "Add 1 and 2."}]
    ends: list[tuple[str, int]] = []
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as client:
        for number, (back, bits) in enumerate(modes):
            name, start = ends[-1 - back] if back < len(ends) else (None, 0)
            sent = [
                {"type": "item_reference", "id": item["id"]} if "id" in item and bits >> place & 1 else item
                for place, item in enumerate(items)
            ]
            body = {"model": "tiny", "instructions": "Be short.", "input": sent[start:], "tools": TOOLS}
            body |= {"previous_response_id": name} if name else {}
            body |= {"stream": True} if stream and number % 2 else {}
            async with client.post(f"{url}/v1/responses", json=body) as response:
                reply = await read(response)
            assert response.status == 200, reply
            items += reply["output"]
            ends.append((reply["id"], len(items)))
            calls = [item["call_id"] for item in reply["output"] if item["type"] == "function_call"]
            results = [{"type": "function_call_output", "call_id": each, "output": "3"} for each in calls]
            items += results or [{"role": "user", "content": f"And {number}?"}]


async def read(response: aiohttp.ClientResponse) -> Any:
    """Return the response, also from the last event of a stream."""
    if response.content_type == "application/json":
        return await response.json()
    events = (await response.text()).strip().split("\n\n")
    return json.loads(events[-1].partition("data: ")[2])["response"]


def record(modes: list[Mode], *, stream: bool = False) -> list[tuple[list[int], list[int]]]:
    """Return ids and mask of each record of a conversation."""

    async def scenario(session: Any) -> None:
        directory = SessionDirectory("tiny")
        key = directory.add("s-1", session)
        async with GatewayServer(directory) as server:
            await converse(server.url("s-1"), key, modes, stream=stream)

    done = Sessions(TURNS).run(scenario)
    return [(each.input_ids.tolist(), each.response_mask.tolist()) for each in done.records]


WHOLE = [(NUM_TURNS, 0)] * NUM_TURNS


@settings(deadline=None)
@example(modes=[(0, 0)] * NUM_TURNS, stream=False)
@example(modes=[(NUM_TURNS, -1)] * NUM_TURNS, stream=True)
@given(
    modes=st.lists(st.tuples(st.integers(0, NUM_TURNS), st.integers(0, 2**16)), min_size=NUM_TURNS, max_size=NUM_TURNS),
    stream=st.booleans(),
)
def test_names_give_the_same_record(modes: list[Mode], stream: bool) -> None:
    """Ids and mask are those of the conversation that is sent whole; there is one record."""
    named = record(modes, stream=stream)

    assert 1 == len(named)
    assert record(WHOLE) == named
