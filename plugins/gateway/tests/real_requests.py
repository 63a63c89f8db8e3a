"""Requests over HTTP to a real session, with the scripted engine."""

from collections import Counter

import aiohttp
from attrs import evolve, frozen
from session_scenarios import Sessions

from turnwise_gateway.dialects import find_dialect
from turnwise_gateway.server import GatewayServer, SessionDirectory
from turnwise_testing.engines.scripted import SCRIPTED_CAPABILITIES, ScriptedEngine

USER = {"role": "user", "content": "Hi."}
LEAST = {
    "chat": {"model": "tiny", "messages": [USER]},
    "messages": {"model": "tiny", "max_tokens": 64, "messages": [USER]},
    "responses": {"model": "tiny", "input": [USER]},
}
"""The least request of each dialect."""
FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOLS = {
    "chat": [{"type": "function", "function": FUNCTION}],
    "messages": [{"name": "add", "description": "Adds.", "input_schema": FUNCTION["parameters"]}],
    "responses": [{"type": "function", **FUNCTION}],
}
"""The same tool in each dialect."""


EFFECTS = ("ignored_", "wished_", "constrained_")
"""Starts of the metrics about fields."""


@frozen
class Sent:
    """
    A request that was sent.

    Attributes:
        status: of the response.
        body: of the response, parsed; the text of a stream.
        counts: what the request added to the metrics about its fields, without the prefix.
    """

    status: int
    body: object
    counts: dict

    @property
    def message(self):
        """The text of an error, which each dialect has in the same place."""
        return self.body["error"]["message"]


def make_engine(probe):
    """An engine that says one word, and can end a turn at a string."""
    sampled = [*probe.chat.tokenizer.encode("Yes."), probe.chat.stop_token_ids[0]]
    capabilities = evolve(SCRIPTED_CAPABILITIES, stop_strings=True, grammars=True)  # the effect is what counts here
    return ScriptedEngine(lambda _request: sampled, capabilities=capabilities)


def send(dialect, *bodies, template_options=None, **options):
    """Send requests to one session with these options of the agent; a body has the fields that it adds to the least."""
    sent = []

    async def scenario(session):
        directory = SessionDirectory("tiny")
        headers = {"Authorization": f"Bearer {directory.add('s-1', session)}"}
        url = f"/s/s-1/{find_dialect(dialect).path}"
        async with GatewayServer(directory) as server, aiohttp.ClientSession(server.url(), headers=headers) as http:
            for body in bodies:
                before = Counter(session.episode.counters.extra)
                async with http.post(url, json=LEAST[dialect] | body) as response:
                    is_json = response.content_type == "application/json"
                    answer = await (response.json() if is_json else response.text())
                added = Counter(session.episode.counters.extra) - before
                names = ((name, name.removeprefix("gateway/")) for name in added)
                counts = {short: added[name] for name, short in names if short.startswith(EFFECTS)}
                sent.append(Sent(response.status, answer, counts))

    sessions = Sessions(parts={"template_options": template_options or {}})
    given = {"max_calls": len(bodies), "limits": {"max_records": len(bodies)}, **options}
    sessions.run(scenario, **given)
    return sent
