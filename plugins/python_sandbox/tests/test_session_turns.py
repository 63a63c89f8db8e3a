"""Turns of a session: calls that wait for a place or for each other, and the end of a session that waits."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from turnwise_python_sandbox import Sandbox, SandboxConfig, Session, Status, session
from turnwise_python_sandbox.tool import PythonTool, PythonToolConfig

_NEVER_S = 60.0
FORGED = """
import os
for fd in range(3, 1024):
    try: os.write(fd, b'\\0\\0\\0\\x10{"exit_code": 0}' * NUM_REPLIES)
    except OSError: pass
"""


@pytest.fixture(autouse=True)
def endless_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter may take for ever to start, so that only the events of a test end a wait."""
    monkeypatch.setattr(session, "_START_TIMEOUT_S", 10.0**6)


@pytest.fixture
def full(make_sandbox):
    """A sandbox whose only place is taken by a live session, with two threads for calls; and that session."""
    sandbox = make_sandbox(2, servers=1, max_sessions=1, max_in_flight=2)
    live = sandbox.session()
    assert live.run("x = 1").status is Status.OK
    return sandbox, live


async def until_waiting(sandbox: Sandbox, number: int) -> None:
    """Wait until so many jobs are in the queue of a sandbox."""
    async with asyncio.timeout(_NEVER_S):
        while len(sandbox._backend._waiting) != number:  # noqa: ASYNC110 - the supervisor has no event for it
            await asyncio.sleep(0.01)


def test_sessions_that_wait_for_a_place_leave_the_threads_to_others(full) -> None:
    """A live session answers although more sessions wait than there are threads; these get its place one by one."""
    sandbox, live = full

    async def run_and_close(number: int) -> str:
        waiting = sandbox.session()
        result = await waiting.arun(f"print({number})")
        await waiting.aclose()
        return result.stdout

    async def main() -> tuple[str, list[str]]:
        async with asyncio.timeout(_NEVER_S), asyncio.TaskGroup() as group:
            tasks = [group.create_task(run_and_close(number)) for number in range(6)]
            await until_waiting(sandbox, 6)
            answer = await live.arun("print(x)")
            await live.aclose()
        return answer.stdout, [task.result() for task in tasks]

    assert ("1\n", [f"{number}\n" for number in range(6)]) == asyncio.run(main())


def test_a_cancelled_wait_ends_at_once(full) -> None:
    """After the cancellation the session closes although its place never comes free, and leaves the queue."""
    sandbox, live = full

    async def main() -> None:
        waiting = sandbox.session()
        async with asyncio.timeout(_NEVER_S):
            task = asyncio.ensure_future(waiting.arun("print(1)"))
            await until_waiting(sandbox, 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await waiting.aclose()
            await until_waiting(sandbox, 0)

    asyncio.run(main())
    assert "1\n" == live.run("print(x)").stdout
    live.close()


def test_closing_ends_a_call_that_waits_for_a_place(full) -> None:
    """The call on another thread ends with `infra_error`, and closing returns."""
    sandbox, live = full
    waiting = sandbox.session()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(waiting.run, "print(1)")
        while not sandbox._backend._waiting:
            pass
        waiting.close()
        result = call.result(_NEVER_S)

    assert (Status.INFRA_ERROR, True) == (result.status, result.session_lost)
    assert "cancelled before it started" in result.stderr
    live.close()


def test_a_closed_session_starts_anew(full) -> None:
    """A call after the end of a session has a new interpreter."""
    _, live = full
    live.close()
    again = live.run("print('x' in globals())")
    live.close()

    assert "False\n" == again.stdout


def test_an_interpreter_that_cannot_start_ends_the_call(make_pool) -> None:
    """Once the supervisor has given up, the call ends, with the reason."""
    pool = make_pool()
    waiting = Session(pool.supervisor, SandboxConfig())
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(waiting.run, "print(1)")
        for _ in range(3):
            pool.next_server(ready=False).die()
        result = call.result(_NEVER_S)

    assert Status.INFRA_ERROR is result.status
    assert "no fork server can be started" in result.stderr


def test_calls_of_one_session_take_no_thread_while_they_wait_for_each_other(full) -> None:
    """Ten calls at once run in the order in which they came."""
    _, live = full

    async def main() -> list[str]:
        async with asyncio.timeout(_NEVER_S), asyncio.TaskGroup() as group:
            tasks = [group.create_task(live.arun(f"x += 1; print(x, {number})")) for number in range(10)]
        return [task.result().stdout for task in tasks]

    assert [f"{number + 2} {number}\n" for number in range(10)] == asyncio.run(main())
    live.close()


def test_a_call_of_a_closed_sandbox_is_an_infrastructure_error(make_sandbox) -> None:
    """A session outlives its sandbox only in name."""
    sandbox = make_sandbox(2, servers=1)
    left = sandbox.session()
    sandbox.close()

    assert Status.INFRA_ERROR is asyncio.run(left.arun("print(1)")).status
    assert Status.INFRA_ERROR is left.run("print(1)").status


def test_the_tool_releases_a_session_without_blocking() -> None:
    """The event loop runs while the session ends."""
    ended = asyncio.Event()

    async def aclose() -> None:
        await ended.wait()

    async def main() -> None:
        tool = PythonTool(PythonToolConfig(), None)
        async with asyncio.timeout(_NEVER_S), asyncio.TaskGroup() as group:
            group.create_task(tool.release(SimpleNamespace(aclose=aclose)))
            await asyncio.sleep(0)
            ended.set()

    asyncio.run(main())


@pytest.mark.parametrize("num_replies", [1, 2, 50])
def test_a_forged_reply_ends_the_session(sandbox: Sandbox, num_replies: int) -> None:
    """A reply without a call is noticed by the next call, so that no later call takes it for its own."""
    with sandbox.session() as made:
        forged = made.run(FORGED.replace("NUM_REPLIES", str(num_replies)))
        following = made.run("print('ran')\nraise SystemExit(3)")
        after = made.run("print('ran')")

    assert forged.status is Status.OK
    assert (Status.CRASHED, True) == (following.status, following.session_lost)
    assert "a reply came without a call" in following.stderr
    assert (Status.OK, "ran\n") == (after.status, after.stdout)
