"""The cost of a call and the memory of a session, in counts of work and bytes that no clock can change."""

from __future__ import annotations

import gc
import json
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from attrs import evolve
from session_scenarios import ADD, Sessions, as_message, results_of, user

from turnwise.record.trajectory import Trajectory
from turnwise_gateway.dialects import DIALECTS, RequestMemory, read_exchange

NUM_TURNS = 64
FIRST = 4
CALLS = ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>',)
TOOLS = [
    {**ADD, "function": {**ADD["function"], "name": f"tool_{number}", "description": "It adds two numbers. " * 10}}
    for number in range(20)
]


@contextmanager
def counted_calls(counts: Counter[str]) -> Iterator[None]:
    """Count the Python functions that are called inside the `with` statement."""

    def note(_frame: object, event: str, _argument: object) -> None:
        counts["functions"] += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def test_a_late_call_is_no_more_work_than_an_early_one(work: Counter[str]) -> None:
    """Turn 64 parses the same number of bytes, tokenises the same text and calls as many functions as turn 4."""
    found: list[Counter[str]] = []

    async def converse(session: Any) -> None:
        messages, memory = [user("Question 0?")], RequestMemory()
        for _ in range(NUM_TURNS):
            body = json.dumps({"model": "m", "messages": messages, "tools": [ADD]}).encode()
            work.clear()
            with counted_calls(work):
                call = read_exchange(DIALECTS[0], body, {}, memory).call
                answer = await session.answer(call)
                answer.confirm()
            found.append(Counter(work))
            messages += [as_message(answer.reply), *results_of(answer.reply)]

    done = Sessions(turns=CALLS).run(converse)

    assert [NUM_TURNS] == [len(record.turns()) for record in done.records]
    early, late = found[FIRST - 1], found[-1]
    assert early.keys() == late.keys() == {"parsed bytes", "tokenised characters", "functions"}
    for name, number in early.items():
        assert late[name] <= 1.25 * number, (name, early, late)


def test_sessions_share_equal_tools() -> None:
    """The second of two sessions has the schemas of the first, also when its conversation is another."""

    def read(text: str, tools: list[Any], memory: RequestMemory) -> Any:
        body = json.dumps({"model": "m", "messages": [user(text)], "tools": tools}).encode()
        return read_exchange(DIALECTS[0], body, {}, memory).call

    memories = [RequestMemory() for _ in range(3)]
    first, second = read("One?", TOOLS, memories[0]), read("Two?", TOOLS, memories[1])
    other = read("Three?", [dict(reversed(tool.items())) for tool in TOOLS], memories[2])

    assert first.tools is second.tools
    assert first.digest != second.digest
    assert other.tools == first.tools
    assert other.tools is not first.tools  # the order of keys is part of what the template renders


@pytest.mark.slow
def test_the_memory_of_a_session_without_its_tools() -> None:
    """Hundred sessions with one set of tools take 4 KB each, and one request takes 38."""
    tools = TOOLS * 5
    assert len(json.dumps(tools)) > 38_000

    def read(number: int) -> tuple[RequestMemory, Any]:
        body = json.dumps({"model": "m", "messages": [user(f"Question {number}?")], "tools": tools}).encode()
        memory = RequestMemory()
        return memory, evolve(read_exchange(DIALECTS[0], body, {}, memory).call, body=b"")

    assert _bytes_of(read) < 4096


def test_the_memory_of_a_record() -> None:
    """A record without blocks takes no more than 20 bytes for each token, and a little for itself."""

    def begin(_number: int) -> Trajectory:
        record = Trajectory([1] * 2000)
        record.add_action([3] * 200, [-1.0] * 200)
        return record

    assert _bytes_of(begin) < 20 * 2200 + 4096


def _bytes_of(build: Any, count: int = 100) -> float:
    """Return the bytes of one of many objects."""
    kept = [build(-1)]  # with all that is made once
    gc.collect()
    tracemalloc.start()
    try:
        kept += [build(number) for number in range(count)]
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / count
    finally:
        tracemalloc.stop()
