"""The ends of a session end its calls of other servers, which may never answer, and keep each of them once."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from hanging_server import HEAD, HangingServer
from hypothesis import given, settings
from hypothesis import strategies as st
from session_scenarios import Sessions, make_call, user

from turnwise_gateway.agents.watch import wait_for_agent
from turnwise_gateway.calls import CallRefusedError, ForwardedCall
from turnwise_gateway.config import AgentLimits
from turnwise_gateway.models import Endpoint
from turnwise_gateway.server import GatewayServer, SessionDirectory
from turnwise_gateway.session.door import SessionListener

WAIT_S = 60


class Recorder(SessionListener):
    """Notes forwarded calls and the end, in their order."""

    def __init__(self):
        self.told = []

    def on_forwarded(self, call):
        self.told.append(call.path)

    def on_close(self, *, is_trained):
        self.told.append("close")


def describe(number):
    return ForwardedCall(path=str(number), model="judge", body=b"{}", status=0, response=b"")


async def end_agent(session):
    """Let the agent of the session end by itself."""
    await wait_for_agent(asyncio.sleep(0), session, AgentLimits())


async def close(session):
    session.close()


async def refuse_calls(session):
    session.refuse_calls()


ENDS = {"closed": close, "ended by a tool": refuse_calls, "ended by the agent": end_agent}


@settings(max_examples=30)
@given(
    end=st.sampled_from(sorted(ENDS)),
    done=st.lists(st.booleans(), max_size=4),
    repeats=st.integers(1, 2),
)
def test_each_call_is_kept_once(end, done, repeats):
    """The session keeps finished calls first, then hanging calls, and closes after them."""
    recorder, refusals = Recorder(), []

    async def forward(session, number, answered):
        try:
            async with session.others.forwarding(lambda: describe(number)):
                await answered.wait()
        except CallRefusedError as refusal:
            refusals.append((number, refusal.kind))

    async def scenario(session):
        session.door.listeners.append(recorder)
        events = [asyncio.Event() for _ in done]
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            for number, answered in enumerate(events):
                group.create_task(forward(session, number, answered))
            await asyncio.sleep(0)
            for is_done, answered in zip(done, events, strict=True):
                if is_done:
                    answered.set()
                    await asyncio.sleep(0)
            for _ in range(repeats):
                await ENDS[end](session)
        assert session.is_idle

    run = Sessions().run(scenario, models={"judge": Endpoint(base_url="http://127.0.0.1:9/v1")})

    ended = [number for number, is_done in enumerate(done) if is_done]
    hung = [number for number, is_done in enumerate(done) if not is_done]
    assert [*map(str, ended), *map(str, hung), "close"] == recorder.told
    assert [(number, "session_closed") for number in hung] == sorted(refusals)
    assert [call.path for call in run.result.outside_calls] == recorder.told[:-1]


def test_a_failure_of_another_server_is_no_end():
    """A timeout of the body stays a timeout, and the session answers on."""

    async def scenario(session):
        with pytest.raises(TimeoutError):
            async with session.others.forwarding(lambda: describe(0)):
                raise TimeoutError
        (await session.answer(make_call(user("Question 0?")))).confirm()

    assert 1 == len(Sessions().run(scenario).result.outside_calls)


@pytest.mark.parametrize("response", [b"", HEAD], ids=["no response", "half a response"])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_an_end_reaches_both_sides(end, response):
    """The other server sees its client leave, and the agent reads a refusal, or a response that breaks."""

    async def scenario(session, judge):
        directory, began = SessionDirectory("tiny"), asyncio.Event()
        headers = {"Authorization": f"Bearer {directory.add('s-1', session)}"}
        async with GatewayServer(directory) as server, aiohttp.ClientSession(headers=headers) as client:

            async def call():
                body = {"model": "judge", "messages": [user("Hm?")]}
                async with client.post(f"{server.url()}/v1/chat/completions", json=body) as received:
                    began.set()
                    return received.status, await received.read()

            calling = asyncio.ensure_future(call())
            assert await asyncio.to_thread(judge.asked.wait, WAIT_S)
            if response:
                await began.wait()
            await end(session)
            assert await asyncio.to_thread(judge.left.wait, WAIT_S)
            if response:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await calling
            else:
                status, text = await calling
                assert 400 == status
                assert b"session_closed" in text

    with HangingServer(response) as judge:
        models = {"judge": Endpoint(base_url=judge.url, timeout_s=3600)}
        run = Sessions().run(lambda session: scenario(session, judge), models=models)
    (noted,) = run.result.outside_calls
    assert (200 if response else 0) == noted.status
