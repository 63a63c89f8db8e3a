"""All processes of a container end at once, hidden ones too, though its first process always starts another."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time

import psutil
import pytest
from images import ENGINE, IMAGE, RUN_OPTIONS, why_no_containers

from turnwise import Resources
from turnwise.errors import InfrastructureError
from turnwise_testing.checks.workspace import count
from turnwise_workspaces import Command, WorkspaceSpec
from turnwise_workspaces.box.processes import is_dead
from turnwise_workspaces.config import ContainersConfig
from turnwise_workspaces.container_workspace import ContainerWorkspace
from turnwise_workspaces.containers import ContainersBackend


def kill_init(workspace: ContainerWorkspace) -> None:
    """Kill the first process, and wait until the kernel has ended the others."""
    os.kill(workspace._init, signal.SIGKILL)
    while psutil.pid_exists(workspace._init) and not is_dead(workspace._init):
        time.sleep(0.01)


def remove(workspace: ContainerWorkspace) -> None:
    """Remove the container as another program does."""
    subprocess.run([*ENGINE, "rm", "-f", workspace.name], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_the_end_of_processes_needs_no_bound(monkeypatch):
    """Without the bound it ends as well, leaves nothing of the agent, and the first process goes on."""
    if reason := why_no_containers():
        pytest.skip(reason)
    monkeypatch.setattr("turnwise_workspaces.container_workspace._KILL_S", 3600.0)

    async def run():
        config = ContainersConfig(command=ENGINE, run_options=RUN_OPTIONS)
        workspace = await ContainersBackend(config, Resources()).start(WorkspaceSpec(image=IMAGE))
        try:
            await workspace.exec(Command(argv=("/bin/sh", "-c", "sleep 98772 & sleep 98772 &")))
            async with asyncio.timeout(60):
                await workspace.end_processes()
                await workspace.end_processes()
            assert await count(workspace, "sleep 98772") == 0
            async with asyncio.timeout(60):
                while await count(workspace, "sleep 3600") != 1:
                    pass
        finally:
            await workspace.close()

    asyncio.run(run())


HIDDEN = {
    "namespaces": "unshare -Urpf sh -c 'sleep 98773 & sleep 98773' &",
    "namespaces in namespaces": "unshare -Urpf unshare -Urpf sh -c 'sleep 98773 & sleep 98773' &",
    "no variables": "for n in 1 2; do env -i sleep 98773 & done",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", HIDDEN)
def test_processes_that_hide_end(way):
    """In process namespaces of their own they are beside the container's; without variables they are no zombies."""
    if reason := why_no_containers():
        pytest.skip(reason)

    async def run():
        config = ContainersConfig(command=ENGINE, run_options=RUN_OPTIONS)
        workspace = await ContainersBackend(config, Resources()).start(WorkspaceSpec(image=IMAGE))
        try:
            if (await workspace.exec(Command(argv=("/bin/sh", "-c", "unshare -Urpf true")))).exit_code != 0:
                pytest.skip("no process of a container can make namespaces here")
            await workspace.exec(Command(argv=("/bin/sh", "-c", f"({HIDDEN[way]}) > /dev/null 2>&1")))
            async with asyncio.timeout(60):
                while await count(workspace, "sleep 98773") < 2:
                    pass
            await workspace.end_processes()
            assert await count(workspace, "sleep 98773") == 0
        finally:
            await workspace.close()

    asyncio.run(run())


@pytest.mark.slow
def test_a_storm_of_processes_without_variables_ends():
    """Each starts others while it is killed."""
    if reason := why_no_containers():
        pytest.skip(reason)

    async def run():
        config = ContainersConfig(command=ENGINE, run_options=RUN_OPTIONS)
        workspace = await ContainersBackend(config, Resources()).start(WorkspaceSpec(image=IMAGE))
        try:
            storm = "echo 'sh /workspace/s & sh /workspace/s & sleep 0.01' > s; (env -i /bin/sh s) > /dev/null 2>&1 &"
            await workspace.exec(Command(argv=("/bin/sh", "-c", storm)))
            await workspace.end_processes()
            assert await count(workspace, "/workspace/s") == 0
        finally:
            await workspace.close()

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("lose", [kill_init, remove], ids=["its first process is killed", "the engine removes it"])
def test_every_method_says_that_its_container_is_gone(lose):
    """Also the end of its processes, by which an episode knows whether a warm workspace is alive."""
    if reason := why_no_containers():
        pytest.skip(reason)
    config = ContainersConfig(command=ENGINE, run_options=RUN_OPTIONS)

    async def run():
        workspace = await ContainersBackend(config, Resources()).start(WorkspaceSpec(image=IMAGE))
        taken = await workspace.snapshot()
        lose(workspace)
        calls = {
            "exec": lambda: workspace.exec(Command(argv=("true",))),
            "read": lambda: workspace.read("x", max_bytes=1),
            "write": lambda: workspace.write("x", b""),
            "end_processes": workspace.end_processes,
            "listen": workspace.listen,
            "snapshot": workspace.snapshot,
        }
        silent = []
        try:
            for name, method in calls.items():
                try:
                    await method()
                except InfrastructureError:
                    continue
                silent.append(name)
            await workspace.restore(taken)  # it brings a new container
            assert (await workspace.exec(Command(argv=("true",)))).exit_code == 0
        finally:
            await workspace.close()
        assert silent == []

    asyncio.run(run())
