"""Scores of turns and of records that outside agents report, from their reports to the tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from pull_control import Control, error_of

from turnwise import Status
from turnwise.record.result import total_score
from turnwise_reported_reward.reward import ReportedReward


@pytest.mark.parametrize("by", ["number", "id"])
def test_scores_of_turns_lie_on_them_in_any_order(
    run_with: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Each score reaches its turn, also if the server notes a delivery after its echo and after a sub-agent's turn."""
    goes_on, write_eof, is_first = asyncio.Event(), web.StreamResponse.write_eof, iter([True])

    async def write_and_wait(self: web.StreamResponse, data: bytes = b"") -> None:
        is_turn = b'"choices"' in (self.body or b"" if isinstance(self, web.Response) else b"")
        await write_eof(self, data)
        if is_turn and next(is_first, False):
            await goes_on.wait()

    monkeypatch.setattr(web.StreamResponse, "write_eof", write_and_wait)

    async def outside(control: Control, connections: AsyncExitStack) -> None:
        leased = await control.lease()
        lease_id, question = leased["lease"]["id"], {"role": "user", "content": "Question 0?"}

        async def ask(*messages: dict[str, Any]) -> tuple[dict[str, Any], str]:
            url, key = leased["session"]["openai_base_url"], leased["session"]["api_key"]
            body, headers = {"model": "m", "messages": list(messages)}, {"Authorization": f"Bearer {key}"}
            # Each on another connection, because the server still holds the first one.
            http = await connections.enter_async_context(aiohttp.ClientSession())
            async with http.post(f"{url}/chat/completions", json=body, headers=headers) as response:
                reply = await response.json()
                return reply["choices"][0]["message"], reply["id"]

        first, first_id = await ask(question)
        _, second_id = await ask(question, first, {"role": "user", "content": "Go on."})
        _, other_id = await ask({"role": "user", "content": "A sub-agent's question"})
        goes_on.set()
        scores = {first_id: 1.0, second_id: 0.0, other_id: -1.0}
        turns: list[dict[str, Any]] = []
        while len(turns) < 3:
            shown = await control.get(f"/sessions/{lease_id}")
            turns = [turn for record in shown["records"].values() for turn in record]
        for turn in turns:
            name = f"chatcmpl-{turn['id']}"
            named = turn["turn"] if by == "number" else name
            await control.post(f"/sessions/{lease_id}/score", id=name, score=scores[name], turn=named)
        await control.post(f"/sessions/{lease_id}/score", 404, id="x", score=1, turn=3)
        await control.end(leased)

    async def connect(control: Control) -> None:
        async with AsyncExitStack() as connections:
            await outside(control, connections)

    (done,) = run_with(connect, reward=ReportedReward())

    assert [(1.0, 0.0), (-1.0,)] == [score.values for score in done.result.scores]


@pytest.mark.parametrize("kind", ["turn", "record"])
def test_scores_of_a_second_attempt_lie_on_its_records(run_with: Callable[..., Any], kind: str) -> None:
    """The records of a lost attempt have scores of 0."""

    async def outside(control: Control) -> None:
        first = await control.lease()
        await control.work(first)
        await control.end(first, "fail", reason="lost", owner="infra")
        second = await control.lease()
        await control.work(second)
        await control.post(f"/sessions/{second['lease']['id']}/score", id="a", score=0.5, **{kind: 0})
        await control.end(second)

    (done,) = run_with(outside, reward=ReportedReward())

    assert Status.COMPLETED is done.result.status
    assert [0.0, 0.5] == [total_score(score) for score in done.result.scores]


def test_a_score_without_a_turn_is_a_failure(run_with: Callable[..., Any]) -> None:
    """A call in flight that the score ends leaves nothing to train."""
    sampling = asyncio.Event()

    def hold(_request: object) -> float:
        sampling.set()
        return 3600.0

    async def outside(control: Control) -> None:
        leased = await control.lease()
        async with asyncio.TaskGroup() as group:
            calling = group.create_task(error_of(control.work(leased)))
            await sampling.wait()
            await control.post(f"/sessions/{leased['lease']['id']}/score", id="a", score=0.25)
            await calling

    (done,) = run_with(outside, latency_s=hold, reward=ReportedReward())

    assert (Status.FAILED, "agent") == (done.result.status, done.result.fault.owner)
    assert "no turn of the model" in done.result.fault.message
