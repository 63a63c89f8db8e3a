"""The public class `Sandbox`: many callers, dying servers, cancelled runs, and a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sandbox_settings import GROWING_S

from turnwise_python_sandbox import Sandbox, SandboxConfig, SandboxUnavailableError, Status, Tier, shared_sandbox
from turnwise_python_sandbox.job import Job

pytestmark = pytest.mark.usefixtures("starts_a_process")

TIERS = pytest.mark.parametrize("tier", [1, 2])


def server_pids(sandbox: Sandbox) -> tuple[int, ...]:
    """Return the processes of the servers."""
    return sandbox._backend.server_pids


def submit(sandbox: Sandbox, code: str, timeout_s: float | None = None) -> Job:
    """Submit a run and return its job, whose progress a test can watch."""
    return sandbox._submit(code, "", sandbox._build_limits(timeout_s, None, None))


@pytest.mark.own_process
@TIERS
def test_nothing_is_left_after_close(make_sandbox, our_processes, tier: int) -> None:
    """`close` ends servers and hanging programs, and closes every descriptor."""
    before, descriptors = our_processes(), len(os.listdir("/proc/self/fd"))
    sandbox = make_sandbox(tier, servers=1)
    hanging = submit(sandbox, "while True: pass")
    sandbox.run("print(1)")
    sandbox.close()

    assert hanging.future.result().status is Status.INFRA_ERROR
    assert our_processes() <= before
    assert len(os.listdir("/proc/self/fd")) == descriptors


@TIERS
def test_a_closed_sandbox_refuses_runs(make_sandbox, tier: int) -> None:
    """A run after `close` is an error; a second `close` is not."""
    sandbox = make_sandbox(tier)
    sandbox.close()
    sandbox.close()

    with pytest.raises(SandboxUnavailableError, match="closed"):
        sandbox.run("1")


@TIERS
def test_a_killed_server_is_replaced(make_sandbox, wait_until, tier: int) -> None:
    """A server killed during a run fails that run with `infra_error`, and the next run works."""
    sandbox = make_sandbox(tier, servers=1, timeout_s=30.0)
    job = submit(sandbox, "import time; time.sleep(25)")
    wait_until(lambda: job.started_at)
    os.kill(server_pids(sandbox)[0], signal.SIGKILL)
    result = job.future.result()

    assert result.status is Status.INFRA_ERROR
    assert "the fork server died" in result.stderr
    assert "back\n" == sandbox.run("print('back')").stdout


@TIERS
def test_a_server_killed_between_runs_is_replaced(make_sandbox, wait_until, tier: int) -> None:
    """A server killed while idle costs no caller a result."""
    sandbox = make_sandbox(tier, servers=1)
    sandbox.run("pass")
    (pid,) = server_pids(sandbox)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not server_pids(sandbox))

    assert "back\n" == sandbox.run("print('back')").stdout
    assert server_pids(sandbox) != (pid,)


def test_a_run_that_has_not_started_is_retried(make_sandbox, wait_until) -> None:
    """If a server dies before the program starts, another server runs it and the caller sees no failure."""
    sandbox = make_sandbox(2, servers=1)
    sandbox.run("pass")
    pid = server_pids(sandbox)[0]
    os.kill(pid, signal.SIGSTOP)
    job = submit(sandbox, "print('done')")
    wait_until(lambda: job.attempts)
    os.kill(pid, signal.SIGKILL)
    result = job.future.result()

    assert (Status.OK, "done\n") == (result.status, result.stdout)
    assert job.attempts == 2


@pytest.mark.slow
@TIERS
def test_a_stalled_server_delays_no_result(make_sandbox, wait_until, tier: int) -> None:
    """The supervisor reports `timeout` by its own clock if the server stalls."""
    sandbox = make_sandbox(tier, servers=1)
    sandbox.run("pass")
    for timeout_s in GROWING_S:  # on a busy machine the program may not print within a second
        job = submit(sandbox, "print('on', flush=True)\nwhile True: pass", timeout_s=timeout_s)
        wait_until(lambda job=job: job.output.size or job.future.done())
        if not job.future.done():
            break
    pids = _find_tree(server_pids(sandbox)[0])
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    result = job.future.result()
    for pid in pids:
        # The server continues first, and kills the others.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    assert (Status.TIMEOUT, "on\n") == (result.status, result.stdout)


def _find_tree(root: int) -> list[int]:
    """Return a process and its descendants, parents first."""
    found, fresh = [root], [root]
    while fresh:
        children = [
            int(pid) for parent in fresh for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        ]
        found, fresh = found + children, children
    return found


def test_servers_that_cannot_start_are_an_infrastructure_error(make_sandbox, monkeypatch) -> None:
    """If every start fails, the run fails with the reason instead of waiting forever."""
    sandbox = make_sandbox(2, servers=1)
    backend = sandbox._backend
    sandbox.run("pass")
    monkeypatch.setattr("turnwise_python_sandbox.supervisor.start_server", _fail_to_start)
    os.kill(server_pids(sandbox)[0], signal.SIGKILL)

    result = sandbox.run("print(1)")

    assert result.status is Status.INFRA_ERROR
    assert "no more processes" in result.stderr
    assert backend.server_pids == ()


def _fail_to_start(_spec: object) -> None:
    raise OSError("no more processes")


@TIERS
def test_many_threads_and_loops_share_one_sandbox(make_sandbox, tier: int) -> None:
    """Each caller gets its own result, on threads and in event loops on threads."""
    sandbox = make_sandbox(tier)

    def run_on_a_loop(n: int) -> list[str]:
        async def run_several() -> list[str]:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(sandbox.arun(f"print({n}, {i})")) for i in range(4)]
            return [task.result().stdout for task in tasks]

        return asyncio.run(run_several())

    with ThreadPoolExecutor(8) as pool:
        loops = list(pool.map(run_on_a_loop, range(6)))
        plain = list(pool.map(lambda n: sandbox.run(f"print({n})").stdout, range(24)))

    assert [[f"{n} {i}\n" for i in range(4)] for n in range(6)] == loops
    assert [f"{n}\n" for n in range(24)] == plain


@TIERS
def test_a_cancelled_run_is_killed(make_sandbox, programs_of, wait_until, tier: int) -> None:
    """Cancelling a call ends its program, whether it runs or waits, and makes room for the next run."""
    # Far longer than `wait_until` waits: only a kill ends these programs in time.
    sandbox = make_sandbox(tier, servers=1, max_in_flight=1, timeout_s=600.0)
    sandbox.run("pass")
    assert programs_of(sandbox) == set()

    async def cancel() -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(sandbox.arun("while True: pass")) for _ in range(3)]
            await asyncio.to_thread(wait_until, lambda: programs_of(sandbox))
            for task in tasks:
                task.cancel()

    asyncio.run(cancel())

    wait_until(lambda: programs_of(sandbox) == set())
    assert "free\n" == sandbox.run("print('free')").stdout


@TIERS
def test_a_hanging_program_does_not_block_others(make_sandbox, tier: int) -> None:
    """Other runs finish while one program hangs."""
    sandbox = make_sandbox(tier, servers=1, max_in_flight=2, timeout_s=60.0)
    hanging = submit(sandbox, "while True: pass")
    outputs = [sandbox.run(f"print({n})").stdout for n in range(10)]

    assert [f"{n}\n" for n in range(10)] == outputs
    assert not hanging.future.done()


@pytest.mark.slow
@TIERS
def test_256_episodes_of_which_a_tenth_misbehaves(make_sandbox, programs_of, tier: int) -> None:
    """Every one of 256 concurrent episodes gets its own results."""
    bad = [
        "while True: pass",
        "import os; os.kill(os.getpid(), 11)",
        "x = bytearray(10**12)",
        "while True: print('x' * 9999)",
    ]
    # Only a loop may reach it: on a busy machine, a short program among 256 has taken more than two seconds.
    sandbox = make_sandbox(tier, timeout_s=15.0)
    sandbox.run("pass")
    assert programs_of(sandbox) == set()

    async def run_episode(n: int) -> bool:
        if n % 10 == 0:
            status = (await sandbox.arun(bad[n // 10 % 4])).status
            return status is (Status.TIMEOUT, Status.CRASHED, Status.MEMORY, Status.OUTPUT_LIMIT)[n // 10 % 4]
        results = [await sandbox.arun(f"print({n} * {turn})") for turn in range(2)]
        return [f"{n * turn}\n" for turn in range(2)] == [result.stdout for result in results]

    async def run_all() -> list[bool]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run_episode(n)) for n in range(256)]
        return [task.result() for task in tasks]

    assert all(asyncio.run(run_all()))
    assert programs_of(sandbox) == set()


def test_a_forked_child_has_its_own_servers(make_sandbox, run_in_child) -> None:
    """A child can run programs, and does not disturb its parent's servers."""
    sandbox = make_sandbox(2, servers=1)
    sandbox.run("pass")

    def run_and_close() -> list[object]:
        output, pids = sandbox.run("print('child')").stdout, server_pids(sandbox)
        sandbox.close()
        return [output, list(pids)]

    output, pids = run_in_child(run_and_close)

    assert "child\n" == output
    assert set(pids).isdisjoint(server_pids(sandbox))
    assert "parent\n" == sandbox.run("print('parent')").stdout


@pytest.mark.slow
def test_servers_end_with_their_owner(wait_until) -> None:
    """A killed process leaves no server behind."""
    code = (
        "from turnwise_python_sandbox import Sandbox\n"
        "s = Sandbox(tier=2, servers=1, timeout_s=100.0).start()\ns.run('pass')\n"
        "print(s._backend.server_pids[0], flush=True)\ns.run('while True: pass')\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as owner:
        server = int(owner.stdout.readline())
        wait_until(lambda: Path(f"/proc/{server}/task/{server}/children").read_text())
        owner.kill()

    wait_until(lambda: not os.path.exists(f"/proc/{server}"))


def test_the_shared_sandbox_is_one_per_config() -> None:
    """Equal configs share a sandbox, other configs do not, and asking for one does not start it."""
    # Numbers that no other test of this process may have used.
    one, again, other = (shared_sandbox(SandboxConfig(timeout_s=t)) for t in (3.0625, 3.0625, 4.0625))

    assert one is again
    assert one is not other
    assert one._backend is None


def test_time_in_the_queue_is_queued_s(make_sandbox, wait_until) -> None:
    """A run above `max_in_flight` starts when another ends; until then its time counts in `queued_s`."""
    sandbox = make_sandbox(2, servers=1, max_in_flight=1, timeout_s=60.0)
    first, second = submit(sandbox, "while True: pass"), submit(sandbox, "print(1)")
    wait_until(lambda: first.started_at)
    assert not second.sent_at
    killed_at = time.monotonic()
    sandbox._backend.kill(first)
    result = second.future.result()

    assert "1\n" == result.stdout
    assert second.sent_at > killed_at
    assert result.queued_s == second.sent_at - second.submitted_at


def test_results_become_json(sandbox: Sandbox) -> None:
    """`to_json` has plain values, the name of the tier and whether it isolates."""
    found = sandbox.run("print(1)").to_json()

    assert ("ok", "1\n", 0, True) == (found["status"], found["stdout"], found["exit_code"], found["isolated"])
    assert found["tier_name"] == Tier(found["tier"]).name.lower()


@pytest.mark.slow
@pytest.mark.own_process
def test_the_event_loop_is_not_blocked(make_sandbox) -> None:
    """Other tasks of the loop run while a program runs, and a run needs no further thread."""
    sandbox = make_sandbox(2, servers=1)
    num_threads = threading.active_count()
    ticks = 0

    async def run_and_tick() -> str:
        nonlocal ticks
        async with asyncio.TaskGroup() as group:
            running = group.create_task(sandbox.arun("print(input())", stdin="x\n"))
            while not running.done():
                await asyncio.sleep(0)
                ticks += 1
        return running.result().stdout

    assert "x\n" == asyncio.run(run_and_tick())
    assert ticks > 1
    assert threading.active_count() == num_threads


def test_asession_starts_the_sandbox(make_sandbox) -> None:
    """`asession` of a sandbox that is not running starts it, and returns a working session."""
    make_sandbox(2, servers=1)

    async def use() -> str:
        session = await Sandbox(tier=2, servers=1).asession()
        result = await session.arun("print(3)")
        session.close()
        return result.stdout

    assert "3\n" == asyncio.run(use())
