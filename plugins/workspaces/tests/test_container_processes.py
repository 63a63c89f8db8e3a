"""The processes of a container end at once, although its first process starts another one whenever one ends."""

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
