"""The agent over a replica: the replica continues the record, also where the record leaves tokens out."""

import asyncio
import pickle

import pytest
from attrs import evolve

from turnwise.runtime.remote.replica_pool import ReplicaPool
from turnwise.runtime.remote.replica_server import ReplicaServer
from turnwise_routers import LeastTokens
from turnwise_testing.engines.scripted import SCRIPTED_CAPABILITIES


class Client:
    """The pool of a replica, whose messages are pickled; it notes the ids of each request."""

    def __init__(self, engine, group):
        self.capabilities, self.asked = engine.capabilities, {}
        self.pool, server = ReplicaPool(LeastTokens(), engine.capabilities, 1), ReplicaServer(engine)
        server.connect(0, lambda message: self.pool.receive(0, pickle.loads(pickle.dumps(message))))
        loop = asyncio.get_running_loop()

        def send(message):
            loop.call_soon(server.receive, 0, pickle.loads(pickle.dumps(message)), group)

        self.pool.replica_up(0, send)

    async def generate(self, request):
        self.asked[request.request_id] = request.token_ids.tolist()
        return await self.pool.generate(request)

    async def abort(self, request_id):
        await self.pool.abort(request_id)


@pytest.mark.parametrize("layouts", [True, False], ids=["exact", "expanded"])
@pytest.mark.parametrize("path", ["a$", "$", "ab"], ids=["end of turn", "only that", "cut off"])
@pytest.mark.parametrize("summary", ["s$", "$", "s"], ids=["end of turn", "only that", "cut off"])
def test_the_engine_continues_the_record(play, layouts, path, summary):
    """An end of turn inside a block is not part of the record, so the replica must not continue it either."""
    clients = []

    def connect(engine, group):
        clients.append(Client(engine, group))
        return clients[0]

    capabilities = evolve(SCRIPTED_CAPABILITIES, layouts=layouts)
    turns = {"paths": [[path, "$"]], "summaries": [summary]}
    run, script = play(["<Parallel>", "x$"], **turns, capabilities=capabilities, connect=connect)

    assert "completed" == str(run.result.status)
    seen = {request.request_id: request.token_ids.tolist() for _, request in script.asked}
    assert 5 == len(seen)
    assert clients[0].asked == seen
