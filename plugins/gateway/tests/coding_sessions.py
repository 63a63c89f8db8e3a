"""Sessions, wires and checks for tests of coding agents."""

import asyncio

from attrs import define, evolve
from session_scenarios import Sessions

from turnwise import FinishReason
from turnwise_chat_templates.template import ChatTemplate
from turnwise_testing.probes.agent import ProbeParser


@define
class PatientSessions(Sessions):
    """Sessions with time for a program that starts slowly, and with the given chat template."""

    chat: ChatTemplate | None = None

    def probe(self):
        probe = evolve(super().probe(), timeout_s=300.0)
        if self.chat is None:
            return probe
        return evolve(probe, resources=evolve(probe.resources, chat=self.chat, parser=ProbeParser(self.chat)))


class Wire:
    """A wire between an agent and its server, which can be cut."""

    def __init__(self, port):
        self._target, self._transports, self._news = port, set(), asyncio.Event()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_error):
        self._server.close()
        self._cut()

    async def cut_after(self, event):
        """Cut all connections when the agent gets the first bytes after an event."""
        await event.wait()
        self._news.clear()
        await self._news.wait()
        self._cut()

    def _cut(self):
        for transport in self._transports:
            transport.abort()

    async def _connect(self, reader, writer):
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
        ends = {writer.transport, server_writer.transport}
        self._transports |= ends
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(reader, server_writer, None))
                group.create_task(self._carry(server_reader, writer, self._news))
        except* ConnectionError:
            pass
        self._transports -= ends

    async def _carry(self, reader, writer, news):
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
                if news is not None:
                    news.set()
        finally:
            writer.close()


def check_records(done):
    """
    Each answer of the engine is in one record, bit for bit, with its log-probabilities, and is trained once.

    The part of a turn whose client left is an answer as well, and in no record.
    """
    recorded = []
    for record in done.records:
        for start, end in record.turns():
            first = start - record.num_prompt_tokens
            logprobs = record.logprobs[first : first + end - start]
            recorded.append((record.input_ids[start:end].tolist(), logprobs.tolist()))
    whole = (each for each in done.run.answers if each.finish_reason != FinishReason.ABORT)
    answers = [(each.token_ids.tolist(), each.logprobs.tolist()) for each in whole]
    assert sorted(answers) == sorted(recorded)


def kinds(done):
    return [each.kind for each in done.result.lineage]
