"""Sessions: interpreters that keep their variables between calls."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from sandbox_settings import GROWING_S

from turnwise_python_sandbox import Sandbox, SandboxUnavailableError, Status


@pytest.fixture
def session(sandbox: Sandbox):
    """A new session in each tier."""
    with sandbox.session() as made:
        yield made


def test_variables_are_kept(session) -> None:
    """A call uses the names of earlier calls, and has only its own output."""
    outputs = [session.run(code) for code in ("x = 20\ndef f(n): return n + 1", "print(f(x))", "x += 1", "print(f(x))")]

    assert ["", "21\n", "", "22\n"] == [output.stdout for output in outputs]
    assert {Status.OK} == {output.status for output in outputs}


def test_an_exception_keeps_the_variables(session) -> None:
    """An exception ends its call only, and its traceback shows the lines of the call."""
    session.run("x = 1\ndef f():\n    raise ValueError('deep')")
    failed = session.run("f()")

    assert (Status.ERROR, False) == (failed.status, failed.session_lost)
    assert "raise ValueError('deep')" in failed.stderr
    assert "1\n" == session.run("print(x)").stdout


def test_exit_ends_the_call_only(session) -> None:
    """`sys.exit` ends the call and not the interpreter."""
    session.run("x = 1")
    ended = session.run("import sys; sys.exit(4)")

    assert (Status.ERROR, 4, False) == (ended.status, ended.exit_code, ended.session_lost)
    assert "1\n" == session.run("print(x)").stdout


def test_a_timeout_interrupts_and_keeps_the_variables(session, monkeypatch) -> None:
    """At its time limit a call is interrupted, and the interpreter survives."""
    monkeypatch.setattr("turnwise_python_sandbox.session._INTERRUPT_S", 60.0)  # on a busy machine it takes a while
    session.run("x = 1")
    stopped = session.run("while True: pass", timeout_s=0.5)

    assert (Status.TIMEOUT, False) == (stopped.status, stopped.session_lost)
    assert "1\n" == session.run("print(x)").stdout


def test_a_call_that_ignores_the_interrupt_is_killed(session) -> None:
    """Code that ignores the interrupt loses its interpreter, and the next call has a new one."""
    session.run("x = 1")
    code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('in')\nwhile True: pass"
    stopped = next(run for run in (session.run(code, timeout_s=each) for each in GROWING_S) if run.stdout)

    assert (Status.TIMEOUT, True, "in\n") == (stopped.status, stopped.session_lost, stopped.stdout)
    assert "NameError" in session.run("print(x)").stderr


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import os; os._exit(0)", Status.ERROR),
        ("import os; os._exit(9)", Status.ERROR),
        ("import ctypes; ctypes.string_at(0)", Status.CRASHED),
        ("while True: print('x' * 10000)", Status.OUTPUT_LIMIT),
        ("x = []\nwhile True: x.append(bytearray(10**7))", Status.MEMORY),
    ],
)
def test_the_end_of_the_interpreter_is_reported(session, code: str, status: Status) -> None:
    """The result has the status and the loss, and the next call has a new interpreter."""
    ended = session.run(code)

    assert (status, True) == (ended.status, ended.session_lost)
    assert "on\n" == session.run("print('on')").stdout


def test_forged_replies_harm_only_the_session(session) -> None:
    """Junk on the stream of replies ends at most the session, and is never an `infra_error`."""
    code = "import os\nfor fd in range(3, 300):\n    try: os.write(fd, b'\\xff' * 100)\n    except OSError: pass"
    first = session.run(code)
    again = session.run("print('fine')")

    assert first.status in (Status.CRASHED, Status.ERROR, Status.OK)
    assert again.status in (Status.OK, Status.CRASHED)
    assert "fine\n" == session.run("print('fine')").stdout


def test_sessions_do_not_see_each_other(sandbox: Sandbox) -> None:
    """Sessions share neither variables nor files."""
    with sandbox.session() as one, sandbox.session() as other:
        one.run("x = 1\nopen('f', 'w').write('1')")
        assert "NameError" in other.run("print(x)").stderr
        assert "[]\n" == other.run("import os; print(os.listdir('.'))").stdout


def test_idle_sessions_end(make_sandbox, wait_until) -> None:
    """An unused session ends, and its next call starts a new interpreter."""
    sandbox = make_sandbox(2, servers=1, session_idle_s=0.3)
    with sandbox.session() as session:
        session.run("x = 1")
        wait_until(session._interpreter.job.future.done)
        assert "NameError" in session.run("print(x)").stderr


def test_sessions_are_limited(make_sandbox, wait_until) -> None:
    """A session above the limit waits until another ends."""
    sandbox = make_sandbox(2, servers=1, max_sessions=1)
    first, second = sandbox.session(), sandbox.session()
    first.run("pass")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.run, "print(2)")
        wait_until(lambda: sandbox._backend._waiting)
        assert not waiting.done()
        first.close()
        assert "2\n" == waiting.result().stdout
    second.close()


def test_many_sessions_at_once(make_sandbox) -> None:
    """32 concurrent sessions keep their variables apart."""
    sandbox = make_sandbox(2)

    async def count(n: int) -> str:
        session = sandbox.session()
        await session.arun(f"x = {n}")
        await session.arun("x += 1")
        result = await session.arun("print(x)")
        session.close()
        return result.stdout

    async def everyone() -> list[str]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(count(n)) for n in range(32)]
        return [task.result() for task in tasks]

    assert [f"{n + 1}\n" for n in range(32)] == asyncio.run(everyone())


def test_tiers_with_one_process_per_run_have_no_sessions() -> None:
    """Asking for a session in tier 5 is an error that names the tier."""
    with (
        Sandbox(tier=5, unsafe_subprocess=True) as sandbox,
        pytest.raises(SandboxUnavailableError, match="no sessions"),
    ):
        sandbox.session()
