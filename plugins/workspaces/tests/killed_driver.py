"""
A program that opens workspaces, keeps their files, says so, and waits until it is killed.

With `warm` as its last argument it opens one workspace, and another one is warm.
"""

import asyncio
import json
import sys
from pathlib import Path

from turnwise import Resources
from turnwise.config.parts import Choice
from turnwise_workspaces import Command, WorkspaceSpec
from turnwise_workspaces.backends import build_backend
from turnwise_workspaces.owner import WorkspaceOwner
from turnwise_workspaces.ownership import this_process
from turnwise_workspaces.slots import Slots


async def main() -> None:
    backend = build_backend(Choice(sys.argv[1], json.loads(sys.argv[2])), Resources())
    num_warm = int(sys.argv[5:] == ["warm"])
    owner = WorkspaceOwner(backend, Slots(Path(sys.argv[4]), 2, 5.0), num_warm=num_warm)
    for _ in range(2 - num_warm):
        workspace = await owner.open(WorkspaceSpec(image=sys.argv[3]))
        await workspace.exec(Command(argv=("/bin/sh", "-c", "sleep 98764 & echo")))
        await workspace.snapshot()
    while owner.warm.num_ready < num_warm:  # noqa: ASYNC110 - it sets no event
        await asyncio.sleep(0.01)
    print(this_process(), flush=True)
    await asyncio.sleep(600)


asyncio.run(main())
