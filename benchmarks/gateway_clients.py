"""
Shared by the gateway's benchmarks: outside agents in one other process, and a driver that serves them.

The agents speak Chat Completions over HTTP. They hold the conversations of a workload, as an agent with one tool does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from typing import Any

from attrs import define, evolve, field
from turn_cost import PLAN, build_components
from workload import Workload, schemas

from turnwise import Resources, Task
from turnwise.config.parts import Choice
from turnwise.config.resolve import build_part
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import EngineClient
from turnwise.plugin.host import load
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager
from turnwise_chat_templates.template import ChatTemplate

NUM_TOOLS = 10


@define
class Clients:
    """
    The process of the agents: takes tasks with addresses, and says which have ended.

    Attributes:
        process: of the agents.
        num_bytes: size of each request of the last conversation.
        calls: start of each request on the clock of the agents, and seconds to the end of its response, of all
            conversations.
    """

    process: subprocess.Popen[str]
    num_bytes: list[int] = field(factory=list)
    calls: list[tuple[float, float]] = field(factory=list)
    _ended: dict[str, asyncio.Future[None]] = field(factory=dict)
    _reading: asyncio.Future[None] | None = None

    @classmethod
    def start(cls, reply_chars: int, pause_s: float = 0.0, padding: int = 0) -> Clients:
        """
        Start the process.

        Args:
            reply_chars: characters of a tool's reply.
            pause_s: mean pause of an agent before a call.
            padding: bytes of a field without effect in the requests of one agent, which makes no pauses; its seconds
                are left out.
        """
        command = [sys.executable, __file__, str(reply_chars), str(pause_s), str(padding)]
        return cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    def stop(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    async def solve(self, task: Task, client: Any) -> None:
        """Let the process hold the conversation of a task; a function of the agent `external`."""
        loop = asyncio.get_running_loop()
        if self._reading is None:
            self._reading = loop.run_in_executor(None, self._read, loop)
        ended = self._ended[task.uid] = loop.create_future()
        assert self.process.stdin is not None
        job = {"uid": task.uid, "messages": task.messages, "url": client.openai_base_url, "key": client.api_key}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        await ended

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = json.loads(line)
            self.num_bytes = found["bytes"]
            self.calls += map(tuple, found["calls"])
            loop.call_soon_threadsafe(self._ended.pop(found["uid"]).set_result, None)


CLIENTS: list[Clients] = []
"""The process of the current measurement; the agent's function finds it here."""


async def solve(task: Task, client: Any) -> None:
    """Solve one task in the process of the agents."""
    await CLIENTS[-1].solve(task, client)


def build_manager(
    workload: Workload, engine: EngineClient, tokenizer: Any, at_once: int, function: str | None
) -> RolloutManager:
    """Build a manager whose agent is `external` with a function, or `tool_agent` without one."""
    length = 1500 * max(map(len, workload.episodes))
    parts = evolve(build_components(workload, engine, tokenizer, schemas(NUM_TOOLS), length), max_in_flight=at_once)
    if function is not None:
        host, chat = load(), ChatTemplate(tokenizer)
        parser = build_part(host, "tool_parsers", "hermes", Resources(chat=chat))
        options = {"function": function, "max_calls": 1000}
        external = build_part(host, "agents", Choice("external", options), Resources(chat=chat, parser=parser))
        parts = evolve(parts, programs={"tool_agent": EpisodeProgram(agent=external)})
    return RolloutManager(LocalRuntime(engine, parts), PLAN)


async def converse(job: dict[str, Any], workload: Workload, session: Any, pause_s: float, more: dict[str, str]) -> None:
    """Hold one conversation; its calls are left out if it has further fields in each request."""
    messages = list(job["messages"])
    headers = {"Authorization": f"Bearer {job['key']}", "Content-Type": "application/json"}
    num_bytes, calls = [], []
    while True:
        body = json.dumps({"model": "policy", "messages": messages, "tools": schemas(NUM_TOOLS), **more}).encode()
        if pause_s:
            await asyncio.sleep(random.uniform(0, 2 * pause_s))
        started = time.perf_counter()
        async with session.post(f"{job['url']}/chat/completions", data=body, headers=headers) as response:
            response.raise_for_status()
            text = await response.read()
        calls.append((started, time.perf_counter() - started))
        num_bytes.append(len(body))
        message = json.loads(text)["choices"][0]["message"]
        messages.append(message)
        tool_calls = message.get("tool_calls") or []
        if not tool_calls:
            break
        for call in tool_calls:
            result = workload.reply(json.loads(call["function"]["arguments"])["key"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    print(json.dumps({"uid": job["uid"], "bytes": num_bytes, "calls": [] if more else calls}), flush=True)


async def run_clients(reply_chars: int, pause_s: float, padding: int) -> None:
    """Hold the conversations of the jobs on standard input until it ends."""
    import aiohttp

    loop, workload = asyncio.get_running_loop(), Workload((), reply_chars=reply_chars)
    connector, large = aiohttp.TCPConnector(limit=0), None
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            is_large = padding > 0 and (large is None or large.done())
            more = {"user": "x" * padding} if is_large else {}
            task = group.create_task(converse(json.loads(line), workload, session, 0.0 if more else pause_s, more))
            large = task if is_large else large


def main() -> None:
    """Run as the process of the agents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reply_chars", type=int, help="characters of a tool's reply")
    parser.add_argument("pause_s", type=float, help="mean pause before a call")
    parser.add_argument("padding", type=int, help="bytes of a field without effect in requests of one agent")
    options = parser.parse_args()
    asyncio.run(run_clients(options.reply_chars, options.pause_s, options.padding))


if __name__ == "__main__":
    main()
