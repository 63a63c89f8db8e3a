"""A program that opens workspaces, keeps their files, says so, and waits until it is killed."""

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
    owner = WorkspaceOwner(backend, Slots(Path(sys.argv[4]), 2, 5.0))
    for _ in range(2):
        workspace = await owner.open(WorkspaceSpec(image=sys.argv[3]))
        await workspace.exec(Command(argv=("/bin/sh", "-c", "sleep 98764 & echo")))
        await workspace.snapshot()
    print(this_process(), flush=True)
    await asyncio.sleep(600)


asyncio.run(main())
