"""Calls that are passed on to another server: a real one, whose faults the agent sees as they are."""

import asyncio
import json
import threading

import pytest
import requests
from aiohttp import web

from turnwise_gateway.models import Endpoint

BODY = {"model": "judge", "messages": [{"role": "user", "content": "Is it right? é"}], "response_format": {"type": "x"}}


class OtherServer:
    """A server that answers as a test says, and keeps what it got."""

    def __init__(self):
        self.answer, self.received = None, []
        self._ready, self._stopped = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    async def _serve(self):
        async def handle(request):
            self.received.append((request.path_qs, dict(request.headers), await request.read()))
            return await self.answer(request)

        self._loop = asyncio.get_running_loop()
        runner = web.ServerRunner(web.Server(handle), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        self._ready.set()
        await self._stopped.wait()
        await runner.cleanup()

    def stop(self):
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(60)


@pytest.fixture
def judge():
    server = OtherServer()
    yield server
    server.stop()


def send(gateway, path="chat/completions", body=BODY, **headers):
    return requests.post(
        f"{gateway.url}/v1/{path}", json=body, headers={"Authorization": f"Bearer {gateway.key}", **headers}, timeout=60
    )


def noted_calls(gateway):
    """Return the forwarded calls after the server has stopped, as a client may be done before its call is noted."""
    gateway.stop()
    return gateway.backend.forwarded


def respond_with(status, body=b"{}", **headers):
    async def answer(_request):
        return web.Response(status=status, body=body, headers={"Content-Type": "application/json", **headers})

    return answer


@pytest.mark.parametrize(
    ("path", "key_header", "query"),
    [
        ("chat/completions", "Authorization", ""),
        ("responses", "Authorization", ""),
        ("messages", "x-api-key", "?beta=true"),
        ("messages/count_tokens", "x-api-key", ""),
    ],
)
def test_a_request_goes_on_as_it_came(gateway, judge, monkeypatch, path, key_header, query):
    """Its body, its query and the vendor's headers arrive, with the key and the model's name of the other server."""
    monkeypatch.setenv("JUDGE_KEY", "of-the-judge")
    gateway.backend.endpoint = Endpoint(base_url=judge.url + "/", model="judge-8b", api_key_env="JUDGE_KEY")
    judge.answer = respond_with(200, b'{"a": "\xc3\xa9"}')
    names = {"anthropic-version": "2023-06-01", "openai-organization": "o", "cookie": "c", "x-own": "secret"}

    response = send(gateway, path + query, **names)

    assert (200, {"a": "é"}) == (response.status_code, response.json())
    ((received_path, headers, body),) = judge.received
    assert f"/v1/{path}{query}" == received_path
    assert {**BODY, "model": "judge-8b"} == json.loads(body)
    assert "of-the-judge" in headers[key_header]
    assert gateway.key not in str(headers)
    assert ["2023-06-01", "o"] == [headers[name] for name in ("anthropic-version", "openai-organization")]
    assert not {"cookie", "x-own", "Cookie", "X-Own"} & headers.keys()
    (call,) = noted_calls(gateway)
    assert (f"/v1/{path}{query}", "judge", 200) == (call.path, call.model, call.status)
    assert (body, response.content) == (call.body, call.response)
    assert [] == gateway.backend.calls


@pytest.mark.parametrize("status", [302, 400, 429, 500])
def test_an_error_comes_back_as_it_is(gateway, judge, status):
    """With the header that tells clients when to try again; a redirection is not followed."""
    gateway.backend.endpoint = Endpoint(base_url=judge.url)
    judge.answer = respond_with(status, b'{"error": "no"}', **{"retry-after": "7", "Location": judge.url, "x-id": "1"})

    response = send(gateway)

    assert (status, b'{"error": "no"}', "7") == (
        response.status_code,
        response.content,
        response.headers["retry-after"],
    )
    assert "x-id" not in response.headers
    assert 1 == len(judge.received)


def test_a_stream_comes_while_it_is_made(gateway, judge):
    """The client has the first event before the other server writes the second."""
    import openai

    gateway.backend.endpoint = Endpoint(base_url=judge.url)
    seen = threading.Event()

    def event(text):
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "judge", "choices": [choice]}
        return f"data: {json.dumps(chunk)}\n\n".encode()

    async def answer(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event("one"))
        assert await asyncio.to_thread(seen.wait, 60)
        await response.write(event("two") + b"data: [DONE]\n\n")
        return response

    judge.answer = answer
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as client:
        texts = []
        for chunk in client.chat.completions.create(model="judge", messages=BODY["messages"], stream=True):
            texts.append(chunk.choices[0].delta.content)
            seen.set()

    assert ["one", "two"] == texts
    assert [event("one") + event("two") + b"data: [DONE]\n\n"] == [call.response for call in noted_calls(gateway)]


def test_a_server_that_fails_is_named(gateway, judge):
    """A refused connection and a broken one are a 502 that clients may repeat; the session continues."""
    gateway.backend.endpoint = Endpoint(base_url=judge.url)

    async def drop(request):
        request.transport.abort()
        return web.Response()

    judge.answer = drop
    broken = send(gateway)
    judge.stop()
    refused = send(gateway)

    for response in (broken, refused):
        assert 502 == response.status_code
        assert "the server of the model 'judge' failed" in response.json()["error"]["message"]
        assert "x-should-retry" not in response.headers
    assert 200 == send(gateway, body={**BODY, "model": "tiny", "response_format": None}).status_code
    assert [0, 0] == [call.status for call in noted_calls(gateway)]


def test_half_a_response_is_no_whole_one(gateway, judge):
    """A connection that breaks in the middle breaks the agent's too."""
    gateway.backend.endpoint = Endpoint(base_url=judge.url)

    async def break_off(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: half")
        request.transport.close()
        return response

    judge.answer = break_off
    with pytest.raises(requests.exceptions.ChunkedEncodingError):
        send(gateway)
    assert [b"data: half"] == [call.response for call in noted_calls(gateway)]


def test_a_server_that_does_not_answer_is_given_up(gateway, judge):
    """After the option's seconds, as a server that fails."""
    gateway.backend.endpoint = Endpoint(base_url=judge.url, timeout_s=0.2)

    async def wait(_request):
        await asyncio.Event().wait()

    judge.answer = wait
    assert 502 == send(gateway).status_code


def test_an_agent_that_leaves_ends_the_request(gateway, judge):
    """The other server need not write to the end for nobody."""
    gateway.backend.endpoint = Endpoint(base_url=judge.url)
    ended = threading.Event()

    async def write(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            while True:
                await response.write(b"data: more\n\n" * 10_000)
        finally:
            ended.set()

    judge.answer = write
    url, headers = f"{gateway.url}/v1/chat/completions", {"Authorization": f"Bearer {gateway.key}"}
    with requests.post(url, json=BODY, headers=headers, stream=True, timeout=60) as response:
        assert next(response.iter_content(10))
    assert ended.wait(60)


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"model": 1}', b'{"model": "judge", "model": "judge"}', b"\xff"])
def test_a_malformed_body_is_refused_here(gateway, judge, body):
    """The other server never sees it."""
    gateway.backend.endpoint = Endpoint(base_url=judge.url)
    judge.answer = respond_with(200)

    headers = {"Authorization": f"Bearer {gateway.key}"}
    response = requests.post(f"{gateway.url}/v1/chat/completions", data=body, headers=headers, timeout=60)

    assert 400 == response.status_code
    assert [] == judge.received
