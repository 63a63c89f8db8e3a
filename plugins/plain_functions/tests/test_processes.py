"""Processes of tools: a call that hangs leaves nothing behind, whether it or its driver is killed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import hanging_tools

from turnwise.tools.toolbox import ToolBox
from turnwise.types import Task, ToolCall
from turnwise_plain_functions import process, tool

TASK = Task(messages=({"role": "user", "content": "x"},), uid="t")


def wait_until(condition):
    """Wait for a condition, and fail when it does not come true."""
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def processes_in(folder):
    """The ids of the processes that have left files."""
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]


def is_alive(pid):
    """Whether a process runs; one that its parent has not waited for does not."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def folder(tmp_path):
    """A folder for process ids, whose processes are killed at the end of the test."""
    yield tmp_path
    for pid in processes_in(tmp_path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start_driver(folder):
    """A function that starts a driver in a separate session, as a terminal does, and waits until its calls hang."""
    started = []

    def start(how, num, *more, num_processes):
        command = [sys.executable, "-c", "import hanging_tools as t; t.main()", str(folder), how, str(num), *more]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        started.append(
            subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True, env=environment)
        )
        wait_until(lambda: len(processes_in(folder)) == num_processes)
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait()
        each.stdout.close()


@pytest.mark.many_cases(1)
@pytest.mark.parametrize("how", ["fork", "session"])
def test_a_hung_call_that_has_forked_frees_its_slot(folder, monkeypatch, how):
    """A child in another session survives, but holds no slot."""
    monkeypatch.setattr(process, "_PROCESSES", process._Processes())
    tools = [tool(func, run_in="process") for func in (hanging_tools.hang, hanging_tools.hello)]
    num = process.MAX_PROCESSES

    async def run():
        async with ToolBox(tools).session(TASK) as session:
            hang = ToolCall(name="hang", arguments={"folder": str(folder), "how": how})
            calls = [asyncio.ensure_future(session.call(hang)) for _ in range(num)]
            await asyncio.to_thread(wait_until, lambda: len(processes_in(folder)) == 2 * num)
            for call in calls:
                call.cancel()
            return (await session.call(ToolCall(name="hello"))).text

    assert asyncio.run(run()) == "hello"
    process._PROCESSES.end()
    survivors = num if how == "session" else 0
    wait_until(lambda: sum(map(is_alive, processes_in(folder))) == survivors)


@pytest.mark.many_cases(2)
@pytest.mark.parametrize(
    ("how", "number"), [("sleep", signal.SIGTERM), ("regex", signal.SIGKILL), ("fork", signal.SIGKILL)]
)
def test_tools_die_with_their_driver(folder, start_driver, how, number):
    """They sleep, hold the interpreter, or have children."""
    driver = start_driver(how, 3, num_processes=6 if how == "fork" else 3)

    driver.send_signal(number)

    assert driver.wait() == -number
    wait_until(lambda: not any(map(is_alive, processes_in(folder))))


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_reaches_no_tool(folder, start_driver):
    """A terminal interrupts the group of the driver; the calls that run return their results."""
    driver = start_driver("file", 3, "handle-sigint", num_processes=3)

    os.killpg(driver.pid, signal.SIGINT)
    wait_until((folder / "interrupted").exists)
    (folder / "go").touch()

    assert driver.communicate()[0] == "done done done"


def test_a_process_that_starts_after_its_driver_ended_runs_no_call(folder):
    """Its request is in the pipe already."""
    lifeline, end = os.pipe()
    os.close(end)
    server = subprocess.run(
        [sys.executable, "-m", "turnwise_plain_functions.process_server", str(lifeline)],
        input=b'{"module": "pathlib", "name": "Path", "arguments": {}, "convert": false}\n',
        pass_fds=[lifeline],
        stdout=subprocess.PIPE,
        start_new_session=True,
        check=True,
    )
    os.close(lifeline)

    assert server.stdout == b""
