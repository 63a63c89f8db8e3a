"""The channels of a pool: requests survive the loss of a channel, with and without the death of its replica."""

import asyncio

import pytest

from turnwise.runtime.remote import replica_links
from turnwise.runtime.remote.channel import ChannelServer
from turnwise.runtime.remote.replica_links import ReplicaLinks
from turnwise.runtime.remote.replica_pool import ReplicaPool
from turnwise.runtime.remote.replica_server import ReplicaServer
from turnwise.types import GenerateRequest, SamplingParams
from turnwise_routers import LeastTokens
from turnwise_testing.engines.scripted import RandomPolicy, ScriptedEngine

POLICY = RandomPolicy(seed=1, vocab_size=200, end_token_id=5, mean_tokens=6)
HOST = "127.0.0.1"


def request(number):
    sampling = SamplingParams(max_tokens=20, stop_token_ids=(5,), seed=number)
    return GenerateRequest(
        request_id=f"r{number}", trajectory_id=f"t{number}", token_ids=[1, number], sampling=sampling
    )


class Replica:
    """A replica with its channels, which tests cut."""

    def __init__(self, group, make=ScriptedEngine, **engine):
        self.engine, self.opened = make(policy=POLICY, **engine), asyncio.Event()
        self.server = ReplicaServer(self.engine)
        self.writers = []
        self.channels = ChannelServer(self.open, self.receive, self.server.disconnect)
        self.group = group

    def open(self, number, _name, send):
        self.writers.append(send.__self__._writer)
        self.server.connect(number, send)
        self.opened.set()

    def receive(self, number, message):
        self.server.receive(number, message, self.group)

    async def start(self):
        await self.engine.start()
        return await self.channels.open(HOST)

    def cut(self):
        """End the last channel, as a fault of the network does."""
        self.opened.clear()
        self.writers[-1].transport.abort()


async def until(condition):
    """Wait for a condition, and look at it in every pass of the event loop."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the state of engines and servers has no event
            await asyncio.sleep(0)


def run(body, num_replicas=1, **engine):
    """Run a body with the links of a pool and its replicas."""

    async def main():
        async with asyncio.TaskGroup() as group:
            replicas = [Replica(group, **engine) for _ in range(num_replicas)]
            pool = ReplicaPool(LeastTokens(), replicas[0].engine.capabilities, num_replicas, restart_timeout_s=5.0)
            links = ReplicaLinks(pool, "worker 0")
            for index, replica in enumerate(replicas):
                links.replica_up(index, await replica.start())
            await links.wait_until_opened()
            result = await body(links, replicas)
            for index, replica in enumerate(replicas):
                links.replica_down(index, "the test ends")
                await replica.channels.close()
            return result

    return asyncio.run(main())


async def direct(links, _replicas):
    """Return the tokens of four requests without a fault."""
    return [(await links.pool.generate(request(number))).token_ids.tolist() for number in range(4)]


def test_requests_survive_a_cut_channel():
    """They run again with the same results, and no death is counted against them, however often it happens."""

    async def body(links, replicas):
        (replica,) = replicas
        tasks = [asyncio.ensure_future(links.pool.generate(request(number))) for number in range(4)]
        for _ in range(3):
            await until(lambda: replica.engine.stats()["num_running"] == 4)
            replica.cut()
            await replica.opened.wait()
        await until(lambda: replica.engine.stats()["num_running"] == 4)
        replica.engine.latency_s = 0.0
        deaths = [pending.deaths for link in links.pool._links for pending in link.pending.values()]
        replica.cut()
        results = [(await task).token_ids.tolist() for task in tasks]
        return results, deaths, replica.server.load.num_requests

    assert (run(direct), [0] * 4, 0) == run(body, latency_s=1000.0)


def test_a_cut_channel_ends_the_requests_of_its_worker():
    """The engine does not work for results that are dropped, and the replica forgets the contexts."""

    async def body(links, replicas):
        task = asyncio.ensure_future(links.pool.generate(request(0)))
        await until(lambda: replicas[0].engine.stats()["num_running"])
        links.replica_down(0, "it is gone for this worker")
        await until(lambda: not replicas[0].engine.stats()["num_running"])
        await until(lambda: not replicas[0].server._running)
        task.cancel()
        return replicas[0].server._clients, replicas[0].server.load.num_tokens

    assert ({}, 0) == run(body, latency_s=1000.0)


class SlowToEnd(ScriptedEngine):
    """Ends a cancelled request only when it may, and counts the requests at once."""

    async def start(self):
        await super().start()
        self.may_end, self.running, self.most = asyncio.Event(), 0, 0

    async def generate(self, request):
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await super().generate(request)
        except asyncio.CancelledError:
            await self.may_end.wait()
            raise
        finally:
            self.running -= 1


def test_a_request_that_comes_again_waits_for_its_first_attempt():
    """The engine never has two requests of one id, of which it may refuse the second."""

    async def body(links, replicas):
        (replica,) = replicas
        task = asyncio.ensure_future(links.pool.generate(request(0)))
        await until(lambda: replica.engine.running)
        replica.cut()
        await replica.opened.wait()
        await until(lambda: 1 == replica.server._running["r0"][-1].worker)
        replica.engine.latency_s = 0.0
        replica.engine.may_end.set()
        return (await task).token_ids.tolist(), replica.engine.most

    assert (run(direct)[0], 1) == run(body, make=SlowToEnd, latency_s=1000.0)


def break_results(replica):
    """Let the replica send bytes that no worker can read."""

    def open_broken(number, _name, send):
        channel = send.__self__
        replica.writers.append(channel._writer)
        replica.server.connect(number, lambda _message: channel._writer.write((5).to_bytes(8, "little") + b"junk!"))

    replica.channels.on_open = open_broken


@pytest.mark.parametrize("side", ["results", "requests"])
def test_messages_that_break_channel_after_channel_end_it(side, monkeypatch, capsys):
    """The pool hears of it, so that another replica serves; each broken channel is one line."""
    monkeypatch.setattr(replica_links, "_RETRY_S", 0.0)

    def refuse(_number, _message):
        raise ValueError("no such request")

    async def body(links, replicas):
        if side == "results":
            await replicas[0].opened.wait()
            break_results(replicas[0])
            replicas[0].cut()
            await until(lambda: len(replicas[0].writers) == 2)
        else:
            replicas[0].channels.on_message = refuse
        asked = asyncio.ensure_future(links.pool.generate(request(0)))
        await until(lambda: links._tasks[0].done())
        other = Replica(replicas[0].group)
        links.replica_up(1, await other.start())
        result = await asked
        links.replica_down(1, "the test ends")
        await other.channels.close()
        return result.token_ids.tolist(), result.replica

    assert (run(direct)[0], 1) == run(body)
    lines = capsys.readouterr().out.splitlines()
    assert 5 == sum("channel opened again" in line for line in lines)
    assert 1 == sum("replica given up by this worker" in line for line in lines)


def test_a_replica_that_cannot_be_reached_loses_its_requests(monkeypatch):
    """They move to another one, which may be the same one later."""
    monkeypatch.setattr(replica_links, "_UNREACHABLE_S", 0.0)

    async def body(links, replicas):
        first = asyncio.ensure_future(links.pool.generate(request(0)))
        await until(lambda: any(replica.engine.stats()["num_running"] for replica in replicas))
        lost = next(replica for replica in replicas if replica.engine.stats()["num_running"])
        for replica in replicas:
            replica.engine.latency_s = 0.0
        await lost.channels.close()
        lost.cut()
        result = await first
        return result.token_ids.tolist(), result.replica == replicas.index(lost)

    assert (run(direct)[0], False) == run(body, 2, latency_s=1000.0)


def test_a_death_is_counted():
    """The driver says that the replica has died, after its channel has ended."""

    async def body(links, replicas):
        task = asyncio.ensure_future(links.pool.generate(request(0)))
        await until(lambda: replicas[0].engine.stats()["num_running"])
        await replicas[0].channels.close()
        replicas[0].cut()
        await asyncio.sleep(0)
        ((pending,),) = [link.pending.values() for link in links.pool._links]
        links.replica_down(0, "killed")
        second = Replica(replicas[0].group)
        links.replica_up(0, await second.start())
        result = await task
        links.replica_down(0, "the test ends")
        await second.channels.close()
        return pending.deaths, links.pool.num_resent, result.token_ids.tolist()

    assert (1, 1, run(direct)[0]) == run(body, latency_s=1000.0)


def test_a_retired_replica_gets_no_new_channel():
    """Its requests move when the channel ends, and it gets no others."""

    async def body(links, replicas):
        task = asyncio.ensure_future(links.pool.generate(request(0)))
        await until(lambda: any(replica.engine.stats()["num_running"] for replica in replicas))
        (old,) = [index for index, replica in enumerate(replicas) if replica.engine.stats()["num_running"]]
        replicas[1 - old].engine.latency_s = 0.0
        leaving = asyncio.ensure_future(links.retire(old))
        await asyncio.sleep(0)
        replicas[old].cut()
        await leaving
        result = await task
        return result.replica == old, len(replicas[old].writers)

    assert (False, 1) == run(body, 2, latency_s=1000.0)


def test_a_replica_that_retires_while_its_channel_opens_gets_no_request(monkeypatch):
    """It stops when it has no more requests, and would refuse the requests of a new channel."""
    opening, go_on = asyncio.Event(), asyncio.Event()
    open_channel = replica_links.open_channel

    async def open_late(address, name):
        channel = await open_channel(address, name)
        opening.set()
        await go_on.wait()
        return channel

    async def body(links, replicas):
        links.pool.router.choose = lambda _request, loads: [each.available for each in loads].index(True)
        monkeypatch.setattr(replica_links, "open_channel", open_late)
        replicas[0].cut()
        await opening.wait()
        await links.retire(0)
        go_on.set()
        async with asyncio.timeout(30):
            await asyncio.wait([links._tasks[0]])
        return (await links.pool.generate(request(0))).replica

    assert run(body, 2) == 1


def test_a_cancelled_request_leaves_nothing_behind():
    """Also if it is cancelled in the message that contains it, before it runs."""

    async def body(links, replicas):
        for _ in range(3):
            task = asyncio.ensure_future(links.pool.generate(request(0)))
            await asyncio.sleep(0)
            task.cancel()
            await until(task.done)
        await links.pool.generate(request(1))
        await until(lambda: not replicas[0].server._running)
        return replicas[0].server.load.num_tokens

    assert 0 == run(body)
