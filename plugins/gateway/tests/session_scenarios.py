"""Sessions over the real driver and the scripted engine."""

import asyncio
import json
import subprocess
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from attrs import define, evolve, field

from turnwise import Chat, Resources, State
from turnwise_gateway.calls import ModelCall
from turnwise_gateway.server import GatewayServer, SessionDirectory
from turnwise_gateway.session.comparison import check_conversations
from turnwise_gateway.session.grammars import GrammarWriter
from turnwise_gateway.session.options import SessionOptions
from turnwise_gateway.session.parts import SessionParts
from turnwise_gateway.session.session import Session
from turnwise_gateway.tree.messages import split_think
from turnwise_testing.probes.agent import AgentProbe, ProbeParser, make_task, probe_resources
from turnwise_tool_formats.config import LimitConfig
from turnwise_tool_formats.hermes import Hermes
from turnwise_tool_formats.parser import FormatParser

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
TURNS = (
    "The answer is 42, as it must be in the end.",
    "<think>\nI must add.\n</think>\nFirst I add.\n"
    '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1.0}}\n</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {"a": 5, "b": 8}}</tool_call>',
    "<think>Nothing to add.</think>Grüße, 世界: no call here.",
    'Wait <tool_call>{"name": "add"',
    " \n",
)


def user(text):
    return {"role": "user", "content": text}


def make_call(*messages, tools=(ADD,), **changes):
    """Return a call with the digest of its messages and tools, unless `changes` give another."""
    body = json.dumps([messages, tools, sorted(changes.get("stop", ())), changes.get("max_tokens")])
    digest = blake2b(body.encode(), digest_size=8).hexdigest()
    given = {"digest": digest, "dialect": "chat", **changes}
    return ModelCall(messages=tuple(json.loads(json.dumps(messages))), tools=tuple(tools), **given)


def as_message(reply, *, reasoning=True):
    """Return a reply as a client keeps it."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning and reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
    return message


def results_of(reply, text="5"):
    return [{"role": "tool", "tool_call_id": call.id, "content": text} for call in reply.tool_calls]


class OneModel:
    """The models of a session that has only the policy."""

    names = ()


@define(eq=False)
class ScenarioAgent:
    """Runs a function of a session as its agent, and keeps its error."""

    scenario: Any
    parts: SessionParts
    session: Session | None = None
    error: Exception | None = None
    resumable = False

    async def step(self, episode):
        async with asyncio.TaskGroup() as group:
            self.session = Session(episode, self.parts, "session", group.create_task)
            try:
                await self.scenario(self.session)
                await self.session.settle()
                self.session.close()
                await check_conversations(self.session.book)
            except Exception as error:
                self.error = error
                raise
        if self.session.error is not None:
            raise self.session.error
        return State.TERMINATED


@define(eq=False)
class SessionRun:
    """
    An episode whose agent was a scenario.

    Attributes:
        run: of the probe.
        session: after its end.
    """

    run: Any
    session: Session

    @property
    def result(self):
        return self.run.result

    @property
    def records(self):
        return self.result.trajectories

    @property
    def counts(self) -> Mapping[str, float]:
        """Metrics of the gateway, without the prefix."""
        prefix = "gateway/"
        extra = self.result.metrics.extra
        return {name.removeprefix(prefix): value for name, value in extra.items() if name.startswith(prefix)}


def make_grammars(chat):
    """Return the writer of the grammars of calls as `ProbeParser` reads them."""
    return GrammarWriter(chat, FormatParser(Hermes(), LimitConfig(), Resources(chat=chat)), None)


@define
class Sessions:
    """Runs scenarios; `engine` and `limits` change the probe's, and `chat` is another chat template."""

    turns: tuple[str, ...] = TURNS
    parts: Mapping[str, Any] = field(factory=dict)
    chat: Chat | None = None

    def probe(self):
        resources = probe_resources()
        if self.chat is not None:
            resources = evolve(resources, chat=self.chat, parser=ProbeParser(self.chat))
        return AgentProbe(make_agent=lambda: None, resources=resources, turns=self.turns, response_length=1 << 16)

    def run(self, scenario, *, engine=None, limits: Mapping[str, Any] = {}, task=None, **options) -> SessionRun:
        """Run a scenario and return its episode, whatever its status."""
        probe = self.probe()
        parts = SessionParts(
            chat=probe.chat,
            parser=probe.resources.parser,
            split=self.parts.get("split", split_think),
            template_options=self.parts.get("template_options", {}),
            options=SessionOptions(**options),
            grammars=make_grammars(probe.chat) if options.get("structured_output") == "constrain" else None,
        )
        agent = ScenarioAgent(scenario, parts)

        async def run():
            made = engine(probe) if engine else probe.engine()
            await made.start()
            return await probe.run(task or make_task(), agent=agent, engine=made, limits=probe.limits(**limits))

        done = asyncio.run(run())
        if agent.error is not None:  # an assertion of the test, which the driver takes for a failed episode
            raise agent.error
        return SessionRun(done, agent.session)


async def serve_program(session: Session, *command: str, ways: tuple[str, ...], cwd: Path | None = None) -> str:
    """
    Serve a session to a program, which gets the address, the key and further arguments.

    Returns:
        The last line of its output.

    Raises:
        AssertionError: it failed; with its standard error.
    """
    directory = SessionDirectory("tiny")
    key = directory.add("s-1", session)
    async with GatewayServer(directory) as server:
        process = await asyncio.create_subprocess_exec(
            *(*command, server.url("s-1"), key, *ways), cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode().splitlines()[-1]
