"""All processes of a container end at once, hidden ones too, though its first process always starts another."""

from __future__ import annotations

import asyncio

import pytest
from images import ENGINE, IMAGE, RUN_OPTIONS, why_no_containers

from turnwise import Resources
from turnwise_testing.checks.workspace import count
from turnwise_workspaces import Command, WorkspaceSpec
from turnwise_workspaces.config import ContainersConfig
from turnwise_workspaces.containers import ContainersBackend


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
