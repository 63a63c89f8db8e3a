"""The service in SGLang's process, with a tokenizer manager that the test controls."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from attrs import define, field

from turnwise_sglang_engine.frames import Frame
from turnwise_sglang_engine.requests import PLAIN
from turnwise_sglang_engine.service import Service

OPTIONS = {"max_new_tokens": 8, "stop_token_ids": [1]}
GRAMMAR = ["start: /a/", 0]


@define(eq=False)
class CompilingManager:
    """Fails requests as SGLang does with one whose grammar is still compiled when it is aborted."""

    error: str
    asked: asyncio.Event = field(factory=asyncio.Event)
    aborted: asyncio.Event = field(factory=asyncio.Event)
    rid_to_state: dict = field(factory=dict)

    async def generate_request(self, request, _):
        self.rid_to_state[request.rid] = SimpleNamespace(dispatched=True)
        self.asked.set()
        await self.aborted.wait()
        raise ValueError(self.error)
        yield

    def abort_request(self, rid):
        self.aborted.set()


@pytest.mark.parametrize(
    ("error", "is_aborted", "expected"),
    [
        ("Aborted by AbortReq.", True, {"reason": "abort"}),
        ("Aborted by AbortReq.", False, {"error": "ValueError: Aborted by AbortReq."}),
        ("the grammar has an error", True, {"error": "ValueError: the grammar has an error"}),
    ],
)
def test_an_abort_while_the_grammar_is_compiled(error, is_aborted, expected):
    """The turn has no token then; another error, and an abort that nobody asked for, is a failure."""

    async def scenario():
        sent = []
        manager = CompilingManager(error)
        async with asyncio.TaskGroup() as group:
            service = Service(manager, SimpleNamespace(GenerateReqInput=SimpleNamespace), repr, 1, group)
            service.send = lambda head, *arrays: sent.append((head, [len(each) for each in arrays]))
            head = {"op": "generate", "id": 7, "method": PLAIN, "options": OPTIONS, "stream": False, "grammar": GRAMMAR}
            service.receive(Frame(head, [np.array([3], np.int32)]))
            await manager.asked.wait()
            if is_aborted:
                service.receive(Frame({"op": "abort", "id": 7}))
            else:
                manager.aborted.set()
        return sent

    [(head, sizes)] = asyncio.run(scenario())

    assert expected.items() <= head.items()
    assert sizes == ([] if "error" in expected else [0, 0])
