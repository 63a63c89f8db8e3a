"""Tokens reach the listener of a request in another process while the engine samples."""

import asyncio

from attrs import evolve

from turnwise.runtime.remote.replica_pool import ReplicaPool
from turnwise.runtime.remote.replica_server import ReplicaServer
from turnwise.types import GenerateRequest, SamplingParams
from turnwise_routers import LeastTokens
from turnwise_testing.engines.scripted import RandomPolicy, ScriptedEngine

POLICY = RandomPolicy(seed=1, vocab_size=200, end_token_id=5, mean_tokens=1000)


class WaitingEngine(ScriptedEngine):
    """Lets the listener hear the first half of a turn, and waits for `continues`."""

    def __init__(self, **options):
        super().__init__(**options)
        self.continues = asyncio.Event()

    async def generate(self, request):
        result = await super().generate(evolve(request, on_tokens=None))
        if request.on_tokens is not None:
            request.on_tokens(result.token_ids[: len(result.token_ids) // 2].tolist())
        await self.continues.wait()
        return result


class Cluster:
    """Replicas whose engines wait, and the pool of one worker; messages pass through the event loop."""

    def __init__(self, group, num_replicas=2):
        self.group = group
        self.pool = ReplicaPool(LeastTokens(), ScriptedEngine().capabilities, num_replicas, restart_timeout_s=60.0)
        self.engines = [WaitingEngine(policy=POLICY) for _ in range(num_replicas)]
        self.servers = [ReplicaServer(engine) for engine in self.engines]
        self.messages, self.replies = [], []

    async def start(self):
        for index, engine in enumerate(self.engines):
            await engine.start()
            self.up(index)
        return self

    def up(self, index):
        server = self.servers[index]

        def receive(message):
            self.replies.append(message)
            self.pool.receive(index, message)

        def send(message):
            self.messages.append(message)
            asyncio.get_running_loop().call_soon(server.receive, 0, message, self.group)

        server.connect(0, receive)
        self.pool.replica_up(index, send)


def run(body, **options):
    """Run the body of a test with a started cluster."""

    async def main():
        async with asyncio.TaskGroup() as group:
            return await body(await Cluster(group, **options).start())

    return asyncio.run(main())


def request(number):
    """Return a request."""
    sampling = SamplingParams(max_tokens=20, stop_token_ids=(5,))
    return GenerateRequest(request_id=f"r{number}", trajectory_id="t", token_ids=[1, 2, 3], sampling=sampling)


def listening(number, heard):
    """Return a request whose listener keeps the ids, and an event of the first ones."""
    has_heard = asyncio.Event()

    def listen(token_ids):
        heard.extend(token_ids)
        has_heard.set()

    return evolve(request(number), on_tokens=listen), has_heard


def test_ids_arrive_before_the_result():
    """The engine ends its turn only when the listener has heard half of it."""
    heard = []

    async def body(cluster):
        asked, has_heard = listening(0, heard)
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            task = group.create_task(cluster.pool.generate(asked))
            await has_heard.wait()
            assert not task.done()
            cluster.engines[0].continues.set()
        return task.result()

    result = run(body, num_replicas=1)

    assert 0 < len(heard) < len(result.token_ids)
    assert heard == result.token_ids.tolist()[: len(heard)]


def test_a_request_without_a_listener_is_not_streamed():
    """Its message does not ask for tokens, and the replies have none."""

    async def body(cluster):
        cluster.engines[0].continues.set()
        await cluster.pool.generate(request(0))
        return cluster.messages, cluster.replies

    messages, replies = run(body, num_replicas=1)

    assert {()} == {message.streamed for message in messages}
    assert {()} == {message.heard for message in replies}


def test_a_listener_hears_one_replica_only():
    """After the death of a replica that it has heard, another one may sample other ids."""
    heard = []

    async def body(cluster):
        asked, has_heard = listening(0, heard)
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            task = group.create_task(cluster.pool.generate(asked))
            await has_heard.wait()
            (first,) = (index for index, link in enumerate(cluster.pool._links) if link.pending)
            before = list(heard)
            cluster.engines[1 - first].continues.set()
            cluster.pool.replica_down(first, "it died")
            await task
            cluster.engines[first].continues.set()
            return before, [message.streamed for message in cluster.messages if message.request_ids]

    before, streamed = run(body)

    assert [("r0",), ()] == streamed
    assert before == heard


def test_a_request_that_was_not_heard_is_streamed_again():
    """A replica that dies before the first ids leaves the listener to the next one."""
    heard = []

    async def body(cluster):
        asked, has_heard = listening(0, heard)
        cluster.pool.replica_down(1, "it is not there")
        cluster.servers[0].disconnect(0)  # its replies are lost
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            task = group.create_task(cluster.pool.generate(asked))
            await asyncio.sleep(0)
            cluster.up(1)
            cluster.engines[1].continues.set()
            cluster.pool.replica_down(0, "it died")
            await task
            assert has_heard.is_set()
            cluster.engines[0].continues.set()

    run(body)

    assert heard
