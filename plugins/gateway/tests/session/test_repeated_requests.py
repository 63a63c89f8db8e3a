"""A repeated request gets the turn of the first one, and a further sample of the same prompt does not."""

import asyncio
from contextlib import asynccontextmanager

import httpx2
import pytest
from session_scenarios import Sessions, make_call, user

from turnwise import Capabilities
from turnwise_gateway.server import GatewayServer, ServerOptions, SessionDirectory
from turnwise_testing.engines.scripted import ScriptedEngine

MARKED = {"headers": {"x-stainless-retry-count": "1"}}
MESSAGES = [{"role": "user", "content": "Question 0?"}]


def numbered(probe):
    """Return an engine whose turns are numbered, so that no two are equal."""
    numbers = iter(range(10**6))
    return ScriptedEngine(
        lambda _request: [*probe.chat.tokenizer.encode(f"Turn {next(numbers)}."), probe.chat.stop_token_ids[0]],
        capabilities=Capabilities(abort=True),
    )


async def at_once(*calls):
    """Return the results of calls that run at the same time."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]


async def ask(session, **changes):
    answer = await session.answer(make_call(user("Question 0?"), **changes))
    answer.confirm()
    return answer.reply.content


def test_samples_of_one_prompt_are_independent():
    """A marked request whose first try never arrived gets a new turn, beside other requests and after them."""
    found = []

    async def scenario(session):
        found.extend(await at_once(ask(session), ask(session), ask(session, **MARKED)))
        found.append(await ask(session, **MARKED))
        found.append(await ask(session, key="a"))
        found.append(await ask(session, key="b"))

    done = Sessions().run(scenario, engine=numbered)

    assert 6 == len(set(found)) == sum(len(record.turns()) for record in done.records)


@pytest.mark.parametrize("state", ["sampled", "on its way", "left", "lost", "delivered"])
@pytest.mark.parametrize("key", ["", "a"])
def test_a_repeated_request_gets_its_turn(key, state):
    """With a key in every state of the turn, else only if no client has read it; the turn is trained once."""
    replies = []

    async def scenario(session):
        call = make_call(user("Question 0?"), key=key)
        if state == "sampled":
            answers = await at_once(session.answer(call), session.answer(call))
        else:
            first = await session.answer(call)
            if state in ("lost", "delivered"):
                first.confirm()
            if state == "lost":
                first.lose()
            if state == "left":
                first.release()
            answers = [first, await session.answer(call)]
        for answer in answers:
            answer.confirm()
            replies.append(answer.reply)

    done = Sessions().run(scenario, engine=numbered)

    repeats = bool(key) or state in ("left", "lost")
    assert (1 if repeats else 2) == len({reply.id for reply in replies})
    trained = sum(int(record.response_mask.sum()) for record in done.records)
    assert sum(len(reply.token_ids) for reply in {reply.id: reply for reply in replies}.values()) == trained


def test_an_echo_shows_that_a_lost_response_was_read():
    """A turn that its client sends back does not answer another request."""

    async def scenario(session):
        answer = await session.answer(make_call(user("Question 0?")))
        answer.confirm()
        answer.lose()
        echo = {"role": "assistant", "content": answer.reply.content}
        (await session.answer(make_call(user("Question 0?"), echo, user("Go on.")))).confirm()
        assert answer.reply.content != await ask(session)

    Sessions().run(scenario, engine=numbered)


class LossyTransport(httpx2.AsyncHTTPTransport):
    """
    Loses the first try of a request: before it is sent, or after its response was read by a proxy.

    Attributes:
        tries: number of requests so far.
        loses: `requests` or `responses`.
    """

    def __init__(self, loses):
        super().__init__()
        self.tries, self.loses = 0, loses

    async def handle_async_request(self, request):
        self.tries += 1
        if self.tries == 1 and self.loses == "requests":
            raise httpx2.ConnectError("refused")
        response = await super().handle_async_request(request)
        if self.tries == 1:
            await response.aread()
            await response.aclose()
            raise httpx2.ReadError("reset")
        return response


@asynccontextmanager
async def serving(session):
    """Serve a session; yield its base URL and its key."""
    directory = SessionDirectory("tiny")
    key = directory.add(session.name, session)
    async with GatewayServer(directory, ServerOptions()) as server:
        yield server.url(session.name), key


async def create(dialect, url, key, transport, **options):
    """Call the model with a library, which sends the request once more when it was lost; return the text."""
    import anthropic
    import openai

    async with httpx2.AsyncClient(transport=transport) as http:
        if dialect == "messages":
            client = anthropic.AsyncAnthropic(base_url=url, api_key=key, http_client=http)
            reply = await client.messages.create(model="m", max_tokens=64, messages=MESSAGES, **options)
            return reply.content[0].text
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, http_client=http)
        if dialect == "responses":
            return (
                await client.responses.create(model="m", max_output_tokens=64, input=MESSAGES, **options)
            ).output_text
        reply = await client.chat.completions.create(model="m", max_tokens=64, messages=MESSAGES, **options)
        return reply.choices[0].message.content


@pytest.mark.many_cases(2)
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
@pytest.mark.parametrize("loses", ["requests", "responses"])
def test_libraries_repeat_a_request(dialect, loses):
    """The retry of a lost request is a new sample; with a key, the retry of a lost response gets the response."""
    found, tries = [], []

    async def scenario(session):
        async with serving(session) as (url, key):
            found.append(await create(dialect, url, key, httpx2.AsyncHTTPTransport()))
            transport = LossyTransport(loses)
            headers = {"Idempotency-Key": "a"} if loses == "responses" else {}
            found.append(await create(dialect, url, key, transport, extra_headers=headers))
            tries.append(transport.tries)

    done = Sessions().run(scenario, engine=numbered)

    assert ["Turn 0.", "Turn 1."] == found
    assert [2] == tries
    assert 2 == sum(len(record.turns()) for record in done.records)
