"""The sandbox as a part: many callers, dying servers, and nothing left at the end."""

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

from turnwise_python_sandbox import Sandbox, SandboxConfig, SandboxUnavailableError, Status, Tier, shared_sandbox

TIERS = pytest.mark.parametrize("tier", [1, 2])


def server_pids(sandbox: Sandbox) -> tuple[int, ...]:
    """Return the servers' processes."""
    return sandbox._started.backend.server_pids


@TIERS
def test_nothing_is_left_after_close(make_sandbox, our_processes, tier: int) -> None:
    """Servers, programs, directories and descriptors are gone once it is closed, programs that hang included."""
    before, descriptors = our_processes(), len(os.listdir("/proc/self/fd"))
    sandbox = make_sandbox(tier, servers=1)
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(sandbox.run, "while True: pass")
        sandbox.run("print(1)")
        sandbox.close()

    assert hanging.result().status is Status.INFRA_ERROR
    assert our_processes() <= before
    assert len(os.listdir("/proc/self/fd")) == descriptors


@TIERS
def test_a_closed_sandbox_says_so(make_sandbox, tier: int) -> None:
    """Running after `close` is the caller's mistake; closing twice is not."""
    sandbox = make_sandbox(tier)
    sandbox.close()
    sandbox.close()

    with pytest.raises(SandboxUnavailableError, match="closed"):
        sandbox.run("1")


@TIERS
def test_a_killed_server_is_replaced(make_sandbox, tier: int) -> None:
    """A run in flight gets `infra_error`, the next one runs as if nothing had been."""
    sandbox = make_sandbox(tier, servers=1, timeout_s=20.0)
    with ThreadPoolExecutor(1) as pool:
        caught = pool.submit(sandbox.run, "import time; time.sleep(15)")
        while not server_pids(sandbox):
            time.sleep(0.01)
        time.sleep(0.8)
        os.kill(server_pids(sandbox)[0], signal.SIGKILL)
        result = caught.result(timeout=10)

    assert result.status is Status.INFRA_ERROR
    assert "died" in result.stderr
    assert "back\n" == sandbox.run("print('back')").stdout


def test_a_run_that_never_began_is_tried_again(make_sandbox) -> None:
    """When the server dies before the code ran, the caller never learns."""
    sandbox = make_sandbox(2, servers=1)
    sandbox.run("pass")
    pid = server_pids(sandbox)[0]
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sandbox.run, "print('done')")
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        result = waiting.result(timeout=20)

    assert (Status.OK, "done\n") == (result.status, result.stdout)


@TIERS
def test_a_server_that_stalls_delays_no_answer(make_sandbox, tier: int) -> None:
    """The verdict comes by the supervisor's own clock when the server does not give one."""
    sandbox = make_sandbox(tier, servers=1)
    sandbox.run("pass")
    with ThreadPoolExecutor(1) as pool:
        began_at = time.monotonic()
        running = pool.submit(sandbox.run, "print('on', flush=True)\nwhile True: pass", timeout_s=1.0)
        time.sleep(0.5)
        pids = _all_pids(server_pids(sandbox)[0])
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        result = running.result(timeout=10)
        taken_s = time.monotonic() - began_at
        for pid in pids:
            # The server goes on first, and kills the others.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    assert (Status.TIMEOUT, "on\n") == (result.status, result.stdout)
    assert taken_s < 2.0


def _all_pids(root: int) -> list[int]:
    """Return the server's processes that are Python: bubblewrap's own need not be stopped."""
    found, fresh = [root], [root]
    while fresh:
        children = [
            int(pid) for parent in fresh for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        ]
        found, fresh = found + children, children
    return found


def test_servers_that_cannot_start_are_an_infrastructure_error(make_sandbox, monkeypatch) -> None:
    """When every start fails, callers are told why instead of waiting for ever."""
    sandbox = make_sandbox(2, servers=1)
    backend = sandbox._started.backend
    sandbox.run("pass")
    monkeypatch.setattr("turnwise_python_sandbox.supervisor.spawn", _no_spawn)
    os.kill(server_pids(sandbox)[0], signal.SIGKILL)

    result = sandbox.run("print(1)")

    assert result.status is Status.INFRA_ERROR
    assert "no more processes" in result.stderr
    assert backend.server_pids == ()


def _no_spawn(_recipe: object) -> None:
    raise OSError("no more processes")


@TIERS
def test_many_threads_and_loops_share_one(make_sandbox, tier: int) -> None:
    """Threads, and event loops on threads, all get their own answers."""
    sandbox = make_sandbox(tier)

    def on_a_loop(n: int) -> list[str]:
        async def several() -> list[str]:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(sandbox.arun(f"print({n}, {i})")) for i in range(4)]
            return [task.result().stdout for task in tasks]

        return asyncio.run(several())

    with ThreadPoolExecutor(8) as pool:
        loops = list(pool.map(on_a_loop, range(6)))
        plain = list(pool.map(lambda n: sandbox.run(f"print({n})").stdout, range(24)))

    assert [[f"{n} {i}\n" for i in range(4)] for n in range(6)] == loops
    assert [f"{n}\n" for n in range(24)] == plain


@TIERS
def test_a_cancelled_run_is_killed(make_sandbox, programs_of, tier: int) -> None:
    """Cancelling the call frees its place, whether the program runs or still waits."""
    sandbox = make_sandbox(tier, servers=1, max_in_flight=1, timeout_s=30.0)
    sandbox.run("pass")
    assert programs_of(sandbox) == set()

    async def cancel() -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(sandbox.arun("while True: pass")) for _ in range(3)]
            await asyncio.sleep(0.3)
            for task in tasks:
                task.cancel()

    asyncio.run(cancel())
    began_at = time.monotonic()

    assert "free\n" == sandbox.run("print('free')").stdout
    assert time.monotonic() - began_at < 2
    assert programs_of(sandbox) == set()


@TIERS
def test_a_hanging_program_costs_nobody_else(make_sandbox, tier: int) -> None:
    """While one hangs, others run."""
    sandbox = make_sandbox(tier, servers=1, max_in_flight=2, timeout_s=3.0)
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(sandbox.run, "while True: pass")
        quick = [sandbox.run(f"print({n})").stdout for n in range(10)]
        assert not hanging.done()
        assert hanging.result().status is Status.TIMEOUT

    assert [f"{n}\n" for n in range(10)] == quick


@pytest.mark.slow
@TIERS
def test_256_episodes_of_which_a_tenth_misbehaves(make_sandbox, programs_of, tier: int) -> None:
    """Every episode returns with its own result."""
    bad = [
        "while True: pass",
        "import os; os.kill(os.getpid(), 11)",
        "x = bytearray(10**12)",
        "while True: print('x' * 9999)",
    ]
    sandbox = make_sandbox(tier, timeout_s=2.0)
    sandbox.run("pass")
    assert programs_of(sandbox) == set()

    async def episode(n: int) -> bool:
        if n % 10 == 0:
            status = (await sandbox.arun(bad[n // 10 % 4])).status
            return status is (Status.TIMEOUT, Status.CRASHED, Status.MEMORY, Status.OUTPUT_LIMIT)[n // 10 % 4]
        results = [await sandbox.arun(f"print({n} * {turn})") for turn in range(2)]
        return [f"{n * turn}\n" for turn in range(2)] == [result.stdout for result in results]

    async def all_episodes() -> list[bool]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(episode(n)) for n in range(256)]
        return [task.result() for task in tasks]

    assert all(asyncio.run(all_episodes()))
    assert programs_of(sandbox) == set()


def test_a_forked_child_has_servers_of_its_own(make_sandbox) -> None:
    """A child neither uses nor disturbs its parent's servers."""
    sandbox = make_sandbox(2, servers=1)
    sandbox.run("pass")
    pid = os.fork()
    if pid == 0:
        good = False
        try:
            good = sandbox.run("print('child')").stdout == "child\n"
            sandbox.close()
        finally:
            os._exit(0 if good else 1)
    _, status = os.waitpid(pid, 0)

    assert status == 0
    assert "parent\n" == sandbox.run("print('parent')").stdout


def test_servers_end_with_their_owner(tmp_path, our_processes) -> None:
    """A process that is killed leaves no server and no program behind."""
    code = (
        "import threading, time\nfrom turnwise_python_sandbox import Sandbox\n"
        "s = Sandbox(tier=2, servers=1, timeout_s=100.0).start()\ns.run('pass')\n"
        "print(s._started.backend.server_pids[0], flush=True)\ns.run('while True: pass')\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=dict(os.environ))
    server = int(owner.stdout.readline())
    time.sleep(0.5)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{server}") and time.monotonic() < deadline:
        time.sleep(0.05)

    assert not os.path.exists(f"/proc/{server}")


def test_the_shared_sandbox_is_one_per_config() -> None:
    """Equal configs share, different ones do not; none is started by asking."""
    one, again, other = (shared_sandbox(SandboxConfig(timeout_s=t)) for t in (3, 3, 4))

    assert one is again
    assert one is not other
    assert one._started is None


def test_waiting_is_not_counted() -> None:
    """A program's time begins when it does."""
    with Sandbox(servers=1, max_in_flight=1, timeout_s=1.0) as sandbox, ThreadPoolExecutor(3) as pool:
        results = list(pool.map(sandbox.run, ["import time; time.sleep(0.6); print(1)"] * 3))

    assert ["1\n"] * 3 == [result.stdout for result in results]
    assert max(result.queued_s for result in results) > 1.0
    assert max(result.wall_s for result in results) < 1.0


def test_results_become_json(sandbox: Sandbox) -> None:
    """What `--json` prints has plain values, and says the tier and whether it isolates."""
    found = sandbox.run("print(1)").to_json()

    assert ("ok", "1\n", 0, True) == (found["status"], found["stdout"], found["exit_code"], found["isolated"])
    assert found["tier_name"] == Tier(found["tier"]).name.lower()


def test_threads_of_the_caller_are_not_blocked(make_sandbox) -> None:
    """An event loop goes on while a program runs."""
    sandbox = make_sandbox(2, servers=1)
    before = threading.active_count()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            ticking = group.create_task(tick())
            await sandbox.arun("import time; time.sleep(0.5)")
            ticking.cancel()

    asyncio.run(both())

    assert ticks > 10
    assert threading.active_count() - before < 10
