"""
Functions that hang in a process, and a driver that calls them; its arguments are FOLDER, HOW, NUM and `handle-sigint`.

Each process that hangs leaves a file in the folder whose name is its process id.
"""

import asyncio
import os
import re
import signal
import sys
import time
from pathlib import Path

from turnwise.tools.toolbox import ToolBox
from turnwise.types import Task, ToolCall
from turnwise_plain_functions import tool


def hang(folder: str, how: str) -> str:
    """Leave a file, and hang: asleep, with the interpreter held, or as the parent of a child that hangs too."""
    if how in ("fork", "session") and os.fork() == 0:
        if how == "session":
            os.setsid()
        Path(folder, str(os.getpid())).touch()
        signal.pause()
    Path(folder, str(os.getpid())).touch()
    if how == "regex":
        re.match(r"(a+)+b", "a" * 60)
    elif how == "file":
        while not Path(folder, "go").exists():
            time.sleep(0.01)
        return "done"
    else:
        signal.pause()
    return "woke up"


def hello() -> str:
    """Return at once."""
    return "hello"


async def drive(folder: str, how: str, num: int) -> list[str]:
    """Run calls at the same time, and return their texts."""
    hanging = tool(hang, run_in="process")
    task = Task(messages=({"role": "user", "content": "x"},), uid="t")
    async with ToolBox([hanging]).session(task) as session, asyncio.TaskGroup() as group:
        call = ToolCall(name="hang", arguments={"folder": folder, "how": how})
        calls = [group.create_task(session.call(call)) for _ in range(num)]
    return [each.result().text for each in calls]


def main() -> None:
    """Run a driver: a function in a process cannot come from a script."""
    if "handle-sigint" in sys.argv:
        signal.signal(signal.SIGINT, lambda *_: Path(sys.argv[1], "interrupted").touch())
    sys.stdout.write(" ".join(asyncio.run(drive(sys.argv[1], sys.argv[2], int(sys.argv[3])))))
