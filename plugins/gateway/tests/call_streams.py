"""Parts that the tests of streamed calls share: a tool, an engine that waits, and the vendors' clients."""

import asyncio

from attrs import define, evolve, field
from session_scenarios import Sessions

from turnwise import Registry, Resources
from turnwise_gateway.server import GatewayServer, ServerOptions, SessionDirectory
from turnwise_hermes_parser import register_tool_parsers as register_hermes
from turnwise_tool_parsers import register_tool_parsers

WRITE = {
    "type": "function",
    "function": {
        "name": "write",
        "description": "Write a file.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "n": {"type": "integer"}},
        },
    },
}


@define(eq=False)
class HeldEngine:
    """
    Lets a listener hear a part of its turn, and samples the rest when it is told to.

    Attributes:
        engine: samples whole turns.
        num_first: tokens of the part.
        has_ended: the last token is sampled.
    """

    engine: object
    num_first: int
    continues: asyncio.Event = field(factory=asyncio.Event)
    has_ended: bool = False

    def __getattr__(self, name):
        return getattr(self.engine, name)

    async def generate(self, request):
        result = await self.engine.generate(evolve(request, on_tokens=None))
        request.on_tokens(result.token_ids[: self.num_first].tolist())
        await self.continues.wait()
        self.has_ended = True
        return result


@define(eq=False)
class CallSessions(Sessions):
    """Sessions with the parser of a format."""

    format: str = ""

    def probe(self):
        registry = Registry("tool parser")
        register_hermes(registry)
        register_tool_parsers(registry)
        entry, probe = registry.get(self.format), super().probe()
        parser = entry.factory(entry.config(), Resources(chat=self.chat))
        return evolve(probe, resources=evolve(probe.resources, parser=parser))


def make_client(dialect, server, session, key):
    import anthropic
    import openai

    options = {"api_key": key, "max_retries": 0}
    if dialect == "messages":
        return anthropic.AsyncAnthropic(base_url=server.url(session.name), **options)
    return openai.AsyncOpenAI(base_url=f"{server.url(session.name)}/v1", **options)


async def read_session(session, dialect, read):
    """Serve a session to a client of a dialect; return what `read` returns for it, and the first reply."""
    directory = SessionDirectory("tiny")
    key = directory.add(session.name, session)
    async with (
        asyncio.timeout(60),
        GatewayServer(directory, ServerOptions(delta_s=0)) as server,
        make_client(dialect, server, session, key) as client,
    ):
        found = await read(client)
    await session.settle()
    return found, session.transcript[0].reply
