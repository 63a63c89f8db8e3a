"""Hostile requests of one agent, beside which another agent works."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientSession
from attrs import frozen
from hostile_bodies import HOSTILE, PATHS, Hostile
from session_scenarios import Sessions

from turnwise_chat_templates.render import HuggingFaceTokenizer
from turnwise_gateway import memory
from turnwise_gateway.dialects.request_body import _Scan
from turnwise_gateway.limits import CallLimits
from turnwise_gateway.server import GatewayServer, SessionDirectory
from turnwise_gateway.session.session import Session

HONEST = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Question 0?"}]}).encode()
CONTEXT = 512


@frozen
class Site:
    """A gateway with one session, and a client that knows its key."""

    client: ClientSession
    url: str

    async def post(self, path: str, body: bytes) -> tuple[int, str]:
        """Return status and code of an answer."""
        async with self.client.post(f"{self.url}{path}", data=BytesIO(body)) as response:
            answer = await response.json()
            return response.status, str((answer.get("error") or {}).get("code"))


@asynccontextmanager
async def serving(session: Session) -> AsyncIterator[Site]:
    directory = SessionDirectory("m")
    headers = {"Authorization": f"Bearer {directory.add('s-1', session)}", "Content-Type": "application/json"}
    async with GatewayServer(directory) as server, ClientSession(headers=headers) as client:
        yield Site(client, server.url())


def run(scenario: Callable[[Site], Awaitable[None]], prompt_length: int = CONTEXT // 2) -> Any:
    async def serve(session: Session) -> None:
        async with serving(session) as site:
            await scenario(site)

    limits = {"prompt_length": prompt_length, "response_length": CONTEXT // 2}
    return Sessions().run(serve, limits=limits)


@pytest.mark.many_cases
@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda each: each.name)
def test_a_hostile_body_is_bounded_work(hostile: Hostile, work: Counter[str]) -> None:
    """It is refused before more is parsed and tokenised than the context can hold; then an honest call works."""
    found: list[Any] = []

    async def scenario(site: Site) -> None:
        body = hostile.build()
        work.clear()
        found.append(await site.post(hostile.path, body))
        found.append(Counter(work))
        found.append(await site.post(PATHS["chat"], HONEST))

    run(scenario)
    (status, _code), counts, honest = found

    assert 400 <= status < 500, found
    assert counts["parsed bytes"] <= CallLimits.of_context(CONTEXT).num_bytes
    # Only a rendered prompt says how much of a tool the template shows.
    assert counts["tokenised characters"] <= (3 * 1024 * 1024 if "tool" in hostile.name else 20 * CONTEXT)
    assert honest == (200, "None")


def test_a_long_text_holds_up_no_other_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a long text is tokenised, another call gets its answer; the tokenising waits until it has."""
    started, answered = threading.Event(), threading.Event()
    encode = HuggingFaceTokenizer.encode

    def wait_and_encode(self: HuggingFaceTokenizer, text: str) -> list[int]:
        if len(text) > 100_000:
            started.set()
            assert answered.wait(30), "the event loop tokenises"
        return encode(self, text)

    monkeypatch.setattr(HuggingFaceTokenizer, "encode", wait_and_encode)
    long = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 40_000}]}).encode()
    found: list[Any] = []

    async def scenario(site: Site) -> None:
        async with asyncio.TaskGroup() as group:
            slow = group.create_task(site.post(PATHS["chat"], long))
            await asyncio.to_thread(started.wait, 60)
            found.append(await site.post(PATHS["chat"], HONEST))
            answered.set()
            found.append(await slow)

    run(scenario, prompt_length=1 << 20)

    assert found == [(200, "None"), (200, "None")]


@pytest.mark.parametrize("dialect", PATHS)
def test_a_long_body_is_read_in_a_thread(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the event loop parses no body of more than some KB."""
    threads: list[int] = []
    scan = _Scan.of.__func__

    def note_scan(cls: type[_Scan], source: bytes, base: int = 0) -> _Scan:
        threads.append(threading.get_ident())
        return scan(cls, source, base)

    monkeypatch.setattr(_Scan, "of", classmethod(note_scan))
    item = {"role": "user", "content": "x" * 200_000}
    key = "input" if dialect == "responses" else "messages"

    async def scenario(site: Site) -> None:
        await site.post(PATHS[dialect], json.dumps({"model": "m", "max_tokens": 9, key: [item]}).encode())

    run(scenario)

    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("hostile", [each for each in HOSTILE if "one tool" in each.name])
def test_memory_of_a_long_request_is_given_back(hostile: Hostile, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the work of a long request, the C library gives its memory back; for a short one, nobody asks it to."""
    trims: list[int] = []
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _name: SimpleNamespace(malloc_trim=trims.append))
    found: list[Any] = []

    async def scenario(site: Site) -> None:
        for path, body in ((PATHS["chat"], HONEST), (hostile.path, hostile.build())):
            found.append((await site.post(path, body))[0])
            found.append(len(trims))

    run(scenario, prompt_length=1 << 14)

    honest, before, status, after = found
    assert (200, 0) == (honest, before)
    assert status < 500
    assert after >= 1


def test_a_refusal_by_size_is_the_end_of_the_context() -> None:
    """A body that the context cannot hold counts as a refused call, as if its tokens had been counted."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 3_000_000}]}).encode()
    found: list[Any] = []

    async def scenario(site: Site) -> None:
        found.append(await site.post(PATHS["chat"], body))
        found.append(await site.post(PATHS["messages"], body))

    done = run(scenario)

    assert found == [(400, "context_length_exceeded"), (400, "None")]
    assert done.counts["refused_context_length_exceeded"] == 2
    assert done.session.exhausted is not None
    assert done.session.num_calls == 2
