"""
Measures when a client of each dialect reads the text and the arguments of a call, of a turn that is sampled slowly.

    python benchmarks/gateway_streams.py [--token-ms 20] [--arguments 600] [--parser hermes] [--malformed call text]

The turn has reasoning, a sentence and one call whose arguments have so many characters. The engine samples a token
every few milliseconds, by the clock, and tells its listener. The figures are seconds from the request to an event that
the client has read; `last token` is the time at which the engine has sampled the turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any, Final

import aiohttp
from attrs import define, evolve, field
from measurement import describe_machine

from turnwise import Capabilities, FinishReason, GenerateRequest, GenerateResult, Registry, State, ToolParser
from turnwise.events.logging import configure_logging
from turnwise.protocols import Chat, Episode, Resources
from turnwise_gateway.server import GatewayServer, SessionDirectory
from turnwise_gateway.session.options import SessionOptions
from turnwise_gateway.session.parts import SessionParts
from turnwise_gateway.session.session import Session
from turnwise_hermes_parser import register_tool_parsers as register_hermes
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_resources
from turnwise_tool_parsers import register_tool_parsers
from turnwise_tool_parsers.think_tags import ThinkTags, ThinkTagsConfig

PARAMETERS: Final = {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}}
HEAD: Final = "<think>\nThe file is missing.\n</think>\nI write the file.\n"
CALLS: Final = {
    "hermes": '<tool_call>\n{{"name": "write", "arguments": {{"path": "a.txt", "text": "{text}"}}}}\n</tool_call>',
    "qwen3_coder": (
        "<tool_call>\n<function=write>\n<parameter=path>\na.txt\n</parameter>\n<parameter=text>\n{text}\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
    "llama4_pythonic": '<|python_start|>[write(path="a.txt", text="{text}")]<|python_end|>',
}
COLUMNS: Final = ("first delta", "last text delta", "text closed", "first arguments", "last arguments", "last token")
Event = tuple[str, str]
"""The kind of an event, and its text."""


@define
class SlowEngine:
    """An engine that samples one turn, a token after the other."""

    ids: list[int]
    token_s: float
    ended_at: float = 0.0
    capabilities = Capabilities()

    async def start(self) -> None:
        """Do nothing."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Tell the listener of each id when its time has come."""
        started = time.perf_counter()
        for number, token_id in enumerate(self.ids, 1):
            await asyncio.sleep(max(0.0, started + number * self.token_s - time.perf_counter()))
            if request.on_tokens is not None:
                request.on_tokens([token_id])
        self.ended_at = time.perf_counter()
        return GenerateResult(
            token_ids=self.ids, logprobs=[-0.1] * len(self.ids), finish_reason=FinishReason.STOP, stop_reason=None
        )

    async def abort(self, request_id: str) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        """Do nothing."""


def request_of(dialect: str) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request."""
    message, body = {"role": "user", "content": "Write."}, {"model": "tiny", "stream": True}
    function = {"name": "write", "parameters": PARAMETERS}
    if dialect == "chat":
        return "v1/chat/completions", body | {
            "messages": [message],
            "tools": [{"type": "function", "function": function}],
        }
    if dialect == "responses":
        return "v1/responses", body | {"input": [message], "tools": [{"type": "function", **function}]}
    tool = {"name": "write", "input_schema": PARAMETERS}
    return "v1/messages", body | {"messages": [message], "tools": [tool], "max_tokens": 100_000}


def read_chat(data: dict[str, Any]) -> Iterator[Event]:
    """Yield what an event of Chat Completions brings."""
    for choice in data["choices"]:
        delta = choice["delta"]
        yield "other", delta.get("reasoning_content") or ""
        yield "text", delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            yield "arguments", call["function"].get("arguments") or ""


def read_responses(data: dict[str, Any]) -> Iterator[Event]:
    """Yield what an event of Responses brings."""
    kinds = {"output_text.delta": "text", "function_call_arguments.delta": "arguments"}
    name = data["type"].removeprefix("response.")
    if name.endswith(".delta"):
        yield kinds.get(name, "other"), data["delta"]
    elif name == "output_text.done":
        yield "closed", data["text"]


def read_messages(data: dict[str, Any]) -> Iterator[Event]:
    """Yield what an event of Messages brings; the text has the second block, behind the reasoning."""
    if data["type"] == "content_block_delta":
        delta = data["delta"]
        yield "other", delta.get("thinking", "")
        yield "text", delta.get("text", "")
        yield "arguments", delta.get("partial_json", "")
    elif data["type"] == "content_block_stop" and data["index"] == 1:
        yield "closed", "closed"


READERS: Final = {"chat": read_chat, "messages": read_messages, "responses": read_responses}


@define
class Times:
    """When a client has read the first and the last event of each kind, in seconds from its request."""

    first: dict[str, float] = field(factory=dict)
    last: dict[str, float] = field(factory=dict)
    num_deltas: int = 0

    def note(self, kind: str, seconds: float) -> None:
        """Note an event."""
        self.first.setdefault(kind, seconds)
        self.last[kind] = seconds
        self.num_deltas += kind == "arguments"


async def read_stream(client: aiohttp.ClientSession, url: str, dialect: str) -> tuple[Times, float]:
    """Send a request, and return the times of its events, and its own time."""
    path, body = request_of(dialect)
    started, times = time.perf_counter(), Times()
    async with client.post(f"{url}/{path}", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            for kind, text in READERS[dialect](json.loads(line[6:])):
                if text:
                    times.note(kind, time.perf_counter() - started)
    return times, started


@define
class Measurement:
    """Serves its session to a client of one dialect, as an agent."""

    parts: SessionParts
    engine: SlowEngine
    dialect: str
    row: tuple[float | None, ...] = ()
    num_deltas: int = 0
    resumable = False

    async def step(self, episode: Episode) -> State:
        """Run the client."""
        async with asyncio.TaskGroup() as group:
            session = Session(episode, self.parts, "session", group.create_task)
            directory = SessionDirectory("tiny")
            headers = {"Authorization": f"Bearer {directory.add(session.name, session)}"}
            async with GatewayServer(directory) as server, aiohttp.ClientSession(headers=headers) as client:
                times, started = await read_stream(client, server.url(session.name), self.dialect)
            await session.settle()
            session.close()
        self.num_deltas = times.num_deltas
        self.row = (
            min(times.first.values()),
            times.last["text"],
            times.first.get("closed"),
            times.first["arguments"],
            times.last["arguments"],
            self.engine.ended_at - started,
        )
        return State.TERMINATED


def build_parser(name: str, chat: Chat) -> ToolParser:
    """Return the parser of a format."""
    registry: Registry[ToolParser] = Registry("tool parser")
    register_hermes(registry)
    register_tool_parsers(registry)
    entry = registry.get(name)
    return entry.factory(entry.config(), Resources(chat=chat))


def measure(parser: str, malformed: Any, dialect: str, text: str, token_s: float) -> Measurement:
    """Measure one stream."""
    resources = probe_resources()
    assert resources.chat is not None, "the probe has one"
    resources = evolve(resources, parser=build_parser(parser, resources.chat))
    probe = AgentProbe(make_agent=lambda: None, resources=resources, turns=(), response_length=1 << 16)
    chat, tags = resources.chat, ThinkTags(ThinkTagsConfig())
    parts = SessionParts(
        chat=chat,
        parser=resources.parser,
        split=tags.split,
        settle=tags.settled,
        options=SessionOptions(malformed_calls=malformed),
    )
    ids = [*chat.tokenizer.encode(HEAD + CALLS[parser].format(text=text)), chat.stop_token_ids[0]]
    engine = SlowEngine(ids, token_s)
    measurement = Measurement(parts, engine, dialect)
    asyncio.run(probe.run(make_task(), agent=measurement, engine=engine))
    return measurement


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--token-ms", type=float, default=20.0, help="milliseconds of a token (default: %(default)s)")
    parser.add_argument("--arguments", type=int, default=600, help="characters of an argument (default: %(default)s)")
    parser.add_argument("--parser", choices=CALLS, default="hermes", help="format of the call (default: %(default)s)")
    parser.add_argument("--malformed", nargs="+", choices=("call", "text"), default=["call", "text"])
    options = parser.parse_args()
    configure_logging("warning")
    print(describe_machine())
    text = ("a line of the file, " * options.arguments)[: options.arguments]
    print(f"seconds after the request; {options.token_ms:g} ms a token, {options.parser}")
    print("| malformed_calls | dialect | " + " | ".join(COLUMNS) + " | deltas of arguments |")
    print("|" + " --- |" * (len(COLUMNS) + 3))
    for malformed in options.malformed:
        for dialect in READERS:
            found = measure(options.parser, malformed, dialect, text, options.token_ms / 1e3)
            row = " | ".join("-" if each is None else f"{each:.2f}" for each in found.row)
            print(f"| `{malformed}` | {dialect} | {row} | {found.num_deltas} |", flush=True)


if __name__ == "__main__":
    main()
