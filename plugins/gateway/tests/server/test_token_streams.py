"""A stream from the engine to the client: deltas come while the engine samples, and a turn counts when it is whole."""

import asyncio
import json

import aiohttp
import pytest
from attrs import define, evolve, field
from session_scenarios import Sessions, make_call, user

from turnwise_gateway.server import GatewayServer, ServerOptions, SessionDirectory

BODY = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "Question 0?"}]}
TEXT = "The answer is 42, as it must be in the end."
SESSIONS = Sessions(turns=(TEXT,), parts={"split": None})


@define(eq=False)
class HalfEngine:
    """Lets a listener hear the first half of a turn, and waits."""

    engine: object
    continues: asyncio.Event = field(factory=asyncio.Event)
    was_left: asyncio.Event = field(factory=asyncio.Event)

    def __getattr__(self, name):
        return getattr(self.engine, name)

    async def generate(self, request):
        result = await self.engine.generate(evolve(request, on_tokens=None))
        if request.on_tokens is not None:
            request.on_tokens(result.token_ids[: len(result.token_ids) // 2].tolist())
            try:
                await self.continues.wait()
            except asyncio.CancelledError:
                self.was_left.set()
                raise
        return result


def run(scenario):
    """Run a scenario of engine, session, and a function that opens a stream."""
    engines = []

    def make_engine(probe):
        engines.append(HalfEngine(probe.engine()))
        return engines[-1]

    async def serve(session):
        directory = SessionDirectory("tiny")
        key = directory.add(session.name, session)
        options = ServerOptions(delta_s=0)
        async with GatewayServer(directory, options) as server, aiohttp.ClientSession() as client:
            url, headers = f"{server.url(session.name)}/v1/chat/completions", {"Authorization": f"Bearer {key}"}
            await scenario(engines[0], session, lambda: client.post(url, json=BODY, headers=headers))

    return SESSIONS.run(serve, engine=make_engine)


async def deltas_of(response):
    """Yield the contents of the deltas."""
    async for line in response.content:
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                if content := choice["delta"].get("content"):
                    yield content


def texts_of(done):
    """Return the sampled text of each record."""
    chat = done.session.parts.chat
    return [chat.text(record.response_ids[record.response_mask == 1]) for record in done.records]


def test_a_client_reads_deltas_while_the_engine_samples():
    """The engine continues only when the client has read the first half."""
    contents = []

    async def scenario(engine, session, post):
        async with asyncio.timeout(60), post() as response:
            async for content in deltas_of(response):
                contents.append(content)
                if not engine.continues.is_set():
                    assert len(session.transcript) == 0
                engine.continues.set()
        await session.settle()
        assert len(session.transcript) == 1

    done = run(scenario)

    assert 2 == len(contents)
    assert TEXT == "".join(contents)
    assert [TEXT] == texts_of(done)


@pytest.mark.slow
def test_a_client_that_leaves_in_mid_stream_has_no_turn():
    """Half a turn is in no record, and the next call samples again."""

    async def scenario(engine, session, post):
        async with asyncio.timeout(60):
            response = await post()
            async for _content in deltas_of(response):
                break
            response.close()
            await engine.was_left.wait()
            await session.settle()
            assert len(session.transcript) == 0
            (await session.answer(make_call(user("Question 0?"), tools=()))).confirm()

    done = run(scenario)

    assert [TEXT] == texts_of(done)
