"""Clients get the ids that the model sampled, and the prompt shows these over the results, without a fork."""

import pytest
from attrs import define, evolve
from session_scenarios import ADD, Sessions, make_call, user

from turnwise import Registry, Resources, Status
from turnwise_gateway.server import GatewayServer, SessionDirectory
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.inputs import templates
from turnwise_tool_parsers import register_tool_parsers


def kimi(call_id, body='{"a": 1, "b": 2}'):
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{body}<|tool_call_end|>"


def mistral(*ids):
    calls = ", ".join(f'{{"name": "add", "arguments": {{"a": 1, "b": 2}}, "id": "{each}"}}' for each in ids)
    return f"[TOOL_CALLS] [{calls}]"


@define(eq=False)
class FormatSessions(Sessions):
    """Sessions whose parser is the one of the template's format, and whose model writes the turns in order."""

    parser: str = ""

    def probe(self):
        registry = Registry("tool parser")
        register_tool_parsers(registry)
        entry = registry.get(self.parser)
        probe = super().probe()
        parser = entry.factory(entry.config(), Resources(chat=self.chat))
        return evolve(probe, resources=evolve(probe.resources, parser=parser))

    def engine(self, _probe):
        stop = self.chat.stop_token_ids[0]
        turns = iter([[*self.chat.tokenizer.encode(text), stop] for text in self.turns])
        return ScriptedEngine(lambda _request: next(turns))


KIMI = ("kimi_k2", templates.kimi_chat, "## Return of ", "\n")
MISTRAL = ("mistral", templates.mistral_chat, '"call_id": "', '"')
CASES = {
    "kimi": (KIMI, [kimi("functions.add:0"), kimi("functions.add:1")], ["functions.add:0", "functions.add:1"]),
    "kimi in parallel": (
        KIMI,
        [kimi("functions.add:0") + kimi("functions.add:1")],
        ["functions.add:0", "functions.add:1"],
    ),
    "kimi twice": (KIMI, [kimi("functions.add:0"), kimi("functions.add:0")], ["functions.add:0"] * 2),
    "kimi twice in a turn": (KIMI, [kimi("functions.add:0") * 2], ["functions.add:0"] * 2),
    "kimi without an index": (KIMI, [kimi("add")], ["add"]),
    "mistral": (MISTRAL, [mistral("VvvODy9mT"), mistral("aaaaaaaa1")], ["VvvODy9mT", "aaaaaaaa1"]),
    "mistral twice": (MISTRAL, [mistral("VvvODy9mT", "VvvODy9mT")], ["VvvODy9mT"] * 2),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", CASES)
def test_a_client_gets_the_sampled_ids(name, stream):
    """An id that the model wrote twice is another one for the client, and again the sampled one in the prompt."""
    import openai

    (parser, chat, before, after), turns, expected = CASES[name]
    seen = []

    async def scenario(session):
        directory = SessionDirectory("tiny")
        key = directory.add("s-1", session)
        async with (
            GatewayServer(directory) as server,
            openai.AsyncOpenAI(base_url=f"{server.url('s-1')}/v1", api_key=key, max_retries=0) as client,
        ):
            messages = [user("Add.")]
            for _ in range(len(turns) + 1):
                request = {"model": "tiny", "messages": messages, "tools": [ADD]}
                if stream:
                    async with client.chat.completions.stream(**request) as events:
                        reply = await events.get_final_completion()
                else:
                    reply = await client.chat.completions.create(**request)
                message = reply.choices[0].message
                messages.append(message)
                calls = [each.id for each in message.tool_calls or ()]
                messages += [{"role": "tool", "tool_call_id": each, "content": each} for each in calls]
                seen.extend(calls)

    sessions = FormatSessions((*turns, "Done."), {}, chat(), parser)
    done = sessions.run(scenario, engine=sessions.engine)

    assert done.result.status is Status.COMPLETED
    assert len(set(seen)) == len(expected)
    assert seen == expected or len(set(expected)) < len(expected)
    (record,) = done.records
    text = sessions.chat.tokenizer.decode(record.input_ids)
    assert [part.partition(after)[0] for part in text.split(before)[1:]] == expected


def test_a_fork_shows_the_sampled_ids():
    """A client that changes its first message has the whole history rendered."""

    async def scenario(session):
        messages = [user("Add.")]
        for _ in range(2):
            answer = await session.answer(make_call(*messages))
            answer.confirm()
            reply = answer.reply
            message = {
                "role": "assistant",
                "content": reply.content,
                "tool_calls": [
                    {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                    for call in reply.tool_calls
                ],
            }
            messages += [message, *({"role": "tool", "tool_call_id": c.id, "content": "3"} for c in reply.tool_calls)]
        (await session.answer(make_call(user("Add them."), *messages[1:]))).confirm()

    turns = (kimi("functions.add:0") * 2, kimi("functions.add:0"), "Done.")
    sessions = FormatSessions(turns, {}, templates.kimi_chat(), "kimi_k2")
    done = sessions.run(scenario, engine=sessions.engine)

    _first, fork = done.records
    text = sessions.chat.tokenizer.decode(fork.input_ids)
    assert text.count("<|tool_call_begin|>functions.add:0<") == 3
    assert text.count("## Return of functions.add:0\n3") == 3
