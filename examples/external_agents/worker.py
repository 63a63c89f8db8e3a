"""
Leases episodes of a run, and lets an agent of this folder solve many of them at once. It needs no package.

    .venv-langgraph/bin/python worker.py CONTROL_FILE langgraph_agent.py [openai_base_url | anthropic_base_url]

It ends when it is interrupted, because a training that is resumed opens another control port.
"""

import asyncio
import json
import runpy
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

AT_ONCE = 64
"""Most episodes that this process solves at once."""

Solve = Callable[..., Awaitable[None]]


def post(file: Path, path: str, **body: object) -> dict[str, Any] | None:
    """Send a request to the control port, and return its reply; None for an empty one."""
    access = json.loads(file.read_text())
    headers = {"Authorization": f"Bearer {access['secret']}"}
    request = urllib.request.Request(access["url"] + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        text = response.read()
    return json.loads(text) if text else None


async def solve_leased(file: Path, leased: dict[str, Any], solve: Solve, url: str) -> None:
    """Solve one episode and report its end; the reward of the run scores it."""
    lease, session = leased["lease"], leased["session"]
    try:
        await solve(leased["task"]["messages"], session["model"], base_url=session[url], api_key=session["api_key"])
        news = ("complete", {})
    except Exception as error:  # noqa: BLE001 - each client has other errors
        news = ("fail", {"reason": f"{type(error).__name__}: {error}"})
    try:
        await asyncio.to_thread(post, file, f"/leases/{lease['id']}/{news[0]}", fence=lease["fence"], **news[1])
    except OSError as error:  # the run ended the episode first, for example because its budget is spent
        print(f"lease {lease['id']}: {news} came too late: {error}", file=sys.stderr)


async def work(file: Path, solve: Solve, url: str = "openai_base_url") -> None:
    """Lease episodes while this process runs."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(AT_ONCE))
    free = asyncio.Semaphore(AT_ONCE)
    async with asyncio.TaskGroup() as group:
        while True:
            await free.acquire()
            try:
                leased = await asyncio.to_thread(post, file, "/tasks/lease", worker="example", wait_s=10)
            except urllib.error.HTTPError:
                raise  # such as 401 for a wrong secret
            except OSError:  # no port is open now
                leased = None
                await asyncio.sleep(0.1)
            if leased is None:
                free.release()
            else:
                task = group.create_task(solve_leased(file, leased, solve, url))
                task.add_done_callback(lambda _: free.release())


if __name__ == "__main__":
    control_file, agent, *url = sys.argv[1:]
    asyncio.run(work(Path(control_file), runpy.run_path(agent)["solve"], *url))
