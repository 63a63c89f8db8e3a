"""An engine that goes away, or is started again, while a command runs in a container that does not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
from engine_service import Service
from images import IMAGE, RUN_OPTIONS, list_containers, why_no_containers

from turnwise import Resources
from turnwise.errors import InfrastructureError
from turnwise_workspaces import Command, WorkspaceSpec
from turnwise_workspaces.config import ContainersConfig
from turnwise_workspaces.containers import ContainersBackend
from turnwise_workspaces.engine_command import find_loss

RUNTIME = b"Error: OCI runtime error: runc: exec failed: unable to start container process: fork: no resources\n"


@pytest.mark.parametrize(
    ("code", "errors", "loss"),
    [
        (0, b"warning\nmark 0\n", ""),
        (0, b"warning\n", "its client ended before it"),
        (0, b"", "its client ended before it"),
        (3, b"mark 3\n", ""),
        (137, b"Killed\n", ""),
        (255, b"warning\nError: timed out waiting for file /x/exit/y: internal libpod error\n", "Error: timed out"),
        (125, b'Error: Get "http://d/exec/json": dial unix /x.sock: connect: connection refused\n', "Error: Get"),
        (1, b"Error response from daemon: No such container: x\n", "Error response from daemon"),
        (255, RUNTIME, ""),
        (255, b"Error: of the agent\nmark 255\n", ""),
        (137, b"Error: of the agent, which has killed the shell\n", ""),
        (None, b"Error: of the agent, whose time has ended\n", ""),
        (126, RUNTIME.replace(b"error:", b"exec failed:"), ""),
    ],
)
def test_what_a_client_says(code, errors, loss):
    """Only the engine writes there; a container at its limits, which start no process, is the agent's doing."""
    assert find_loss(code, errors, "mark").startswith(loss)
    assert bool(find_loss(code, errors, "mark")) == bool(loss)


@pytest.fixture
def service(tmp_path) -> Iterator[Service]:
    """A service that runs; nothing of it is left."""
    if reason := why_no_containers():
        pytest.skip(reason)
    service = Service(tmp_path / "podman.sock")
    service.start()
    yield service
    service.kill()
    assert list_containers() == []


def clients() -> list[psutil.Process]:
    """Return the clients of this process that wait for a command."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has ended
            found += [process] if "exec" in process.cmdline() else []
    return found


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [False, True], ids=["away", "back at once"])
def test_a_service_that_is_killed_loses_its_commands(comes_back, service):
    """No command has a result then, and least of all the exit code 0 that a client of a new service gives."""
    config = ContainersConfig(command=service.command, run_options=RUN_OPTIONS)

    async def run():
        workspace = await ContainersBackend(config, Resources()).start(WorkspaceSpec(image=IMAGE))
        try:
            seen = asyncio.Event()
            command = Command(argv=("/bin/sh", "-c", "echo begin; sleep 98770; exit 3"), timeout_s=100.0)
            running = asyncio.ensure_future(workspace.exec(command, lambda _data: seen.set()))
            await seen.wait()
            waiting = clients()
            for each in waiting if comes_back else ():  # so that they do not see the time between
                os.kill(each.pid, signal.SIGSTOP)
            service.kill()
            if comes_back:
                service.start()
            for each in waiting if comes_back else ():
                os.kill(each.pid, signal.SIGCONT)
            with pytest.raises(InfrastructureError, match=r"engine has lost a command|podman failed"):
                await running
            if not comes_back:
                with pytest.raises(InfrastructureError):
                    await workspace.read("x", max_bytes=1)
                service.start()
            done = await workspace.exec(Command(argv=("/bin/sh", "-c", "echo again")))
            assert (done.exit_code, done.stdout) == (0, b"again\n")
        finally:
            await workspace.close()

    asyncio.run(run())


@pytest.mark.slow
def test_a_workspace_that_is_killed_while_the_engine_is_away_is_removed_later(service):
    """`kill` does not wait, and tries again until an engine answers."""
    config = ContainersConfig(command=service.command, run_options=RUN_OPTIONS)

    async def run():
        workspace = await ContainersBackend(config, Resources()).start(WorkspaceSpec(image=IMAGE))
        service.kill()
        with pytest.raises(InfrastructureError):
            await workspace.close()
        workspace.kill()
        service.start()

    asyncio.run(run())
    while list_containers():
        time.sleep(0.1)
