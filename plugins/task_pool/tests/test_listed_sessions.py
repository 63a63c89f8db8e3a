"""The list of sessions of a pool, whose workers are slow, hang or die."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pull_control import Control, serviced

from turnwise_gateway.control.control_server import RequestError
from turnwise_task_pool import make_agent
from turnwise_task_pool.config import PoolConfig
from turnwise_task_pool.driver import offers as offers_module
from turnwise_task_pool.driver.offers import Offers, OpenLease
from turnwise_testing.probes.agent import probe_resources
from turnwise_testing.simulation.virtual_loop import VirtualLoop

NAMES = ("a", "b", "c")


def run(scenario: Callable[[Offers], Awaitable[None]]) -> None:
    """Run a scenario of three workers in virtual time, each of which has an open session that has its name."""

    async def main() -> None:
        offers: Any = Offers(pool=None)  # type: ignore[arg-type]  # these calls do not need it
        for name in NAMES:
            offers.join(name)
            offers._leases[f"s-{name}"] = OpenLease(1, offers._workers[name], control_key="k")
        async with asyncio.timeout(3600):
            await scenario(offers)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


def summary(name: str) -> dict[str, Any]:
    return {"id": f"s-{name}", "status": "open", "num_turns": 1}


async def answer(offers: Offers, name: str) -> int:
    """Answer the next questions of a worker; return their number."""
    questions = await offers.exchange(name, [])
    answers = [[number, [summary(name)]] for number, kind, _body in questions if kind == "list"]
    next_questions = asyncio.ensure_future(offers.exchange(name, answers))
    await asyncio.sleep(0)
    next_questions.cancel()
    return len(answers)


def test_all_workers_are_asked_at_once() -> None:
    """Each has its question before any of them answers. The leases set the order of the list, not the answers."""

    async def scenario(offers: Offers) -> None:
        listing = asyncio.ensure_future(offers.summaries())
        questions = {name: await offers.exchange(name, []) for name in reversed(NAMES)}
        for name, asked in questions.items():
            ((number, kind, _body),) = asked
            assert "list" == kind
            taking = asyncio.ensure_future(offers.exchange(name, [[number, [summary(name)]]]))
            await asyncio.sleep(0)
            taking.cancel()
        assert list(map(summary, NAMES)) == await listing

    run(scenario)


def test_a_worker_that_hangs_does_not_hold_up_the_list() -> None:
    """Its open sessions are there, and it has one question, however often the list is asked for."""

    async def scenario(offers: Offers) -> None:
        offers.note_end("s-b")
        offers._leases["s-b2"] = OpenLease(1, offers._workers["b"], control_key="k")
        offers._leases["s-b3"] = OpenLease(1, offers._workers["b"])  # which is not open yet
        for _ in range(5):
            listing = asyncio.ensure_future(offers.summaries())
            assert [1, 1] == [await answer(offers, name) for name in ("a", "c")]
            assert [summary("a"), summary("c"), {"id": "s-b2", "status": "silent"}] == await listing
        listing = asyncio.ensure_future(offers.summaries())
        await asyncio.sleep(0)
        assert [1, 1, 1] == [await answer(offers, name) for name in NAMES]
        assert list(map(summary, NAMES)) == await listing

    run(scenario)


def test_a_worker_that_dies_meanwhile_is_left_out() -> None:
    """The others are listed, and nothing waits for it."""

    async def scenario(offers: Offers) -> None:
        started, loop = asyncio.ensure_future(offers.attend("b")), asyncio.get_running_loop()
        listing = asyncio.ensure_future(offers.summaries())
        await asyncio.sleep(0)
        started.cancel()
        await asyncio.wait([started])
        begin = loop.time()
        assert [1, 1] == [await answer(offers, name) for name in ("a", "c")]
        assert [summary("a"), summary("c")] == await listing
        assert begin == loop.time()  # of the virtual clock
        again = asyncio.ensure_future(offers.summaries())
        assert [1, 1] == [await answer(offers, name) for name in ("a", "c")]
        assert [summary("a"), summary("c")] == await again

    run(scenario)


def test_a_failed_answer_is_an_error_and_not_an_empty_list() -> None:
    """A worker whose list has a bug must not look like one without sessions."""

    async def scenario(offers: Offers) -> None:
        listing = asyncio.ensure_future(offers.summaries())
        for name in NAMES:
            ((number, _kind, _body),) = await offers.exchange(name, [])
            found: Any = {"error": [500, "failed", "the server failed"]} if name == "b" else [summary(name)]
            taking = asyncio.ensure_future(offers.exchange(name, [[number, found]]))
            await asyncio.sleep(0)
            taking.cancel()
        with pytest.raises(RequestError, match="the server failed"):
            await listing

    run(scenario)


def test_the_port_answers_beside_a_worker_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of the control port gets the list, also while no worker answers at all."""
    monkeypatch.setattr(offers_module, "_LIST_S", 0.1)
    file = tmp_path / "control.json"
    agent = make_agent(PoolConfig(control_file=file), probe_resources())

    async def main() -> Any:
        async with serviced(agent) as services, aiohttp.ClientSession() as http:
            await services.client("task_pool").call("join", worker="hangs", url="http://127.0.0.1:1")
            return await Control(http, file).get("/sessions")

    assert [] == asyncio.run(main())["sessions"]
