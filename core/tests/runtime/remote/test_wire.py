"""The wire between workers and replicas, in one process: deltas, coalescing, failover."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import AsleepError, EngineError
from turnwise.protocols import ReplicaLoad
from turnwise.routing import RoundRobin
from turnwise.runtime.replica_pool import ReplicaPool
from turnwise.runtime.replica_server import ReplicaServer
from turnwise.runtime.wire import pack_requests, pack_results, unpack_requests, unpack_results
from turnwise.testing.scripted import Failure, RandomPolicy, ScriptedEngine
from turnwise.types import FinishReason, GenerateRequest, GenerateResult, SamplingParams

POLICY = RandomPolicy(seed=1, vocab_size=200, end_token_id=5, mean_tokens=6)
SAMPLING = SamplingParams(max_tokens=20, stop_token_ids=(5,))


def request(number, ids, trajectory="t", **sampling):
    return GenerateRequest(
        request_id=f"r{number}", trajectory_id=trajectory, token_ids=ids, sampling=SAMPLING.with_(**sampling)
    )


class Cluster:
    """Replicas and one worker's pool, joined without Ray; messages pass through the event loop."""

    def __init__(self, group, num_replicas=2, coalesce_s=0.0, **engine):
        self.group = group
        self.coalesce_s = coalesce_s
        self.pool = ReplicaPool(RoundRobin(), ScriptedEngine().capabilities, num_replicas, revive_s=0.2)
        self.engines = [ScriptedEngine(policy=POLICY, **engine) for _ in range(num_replicas)]
        self.messages = []
        self.servers = []

    async def start(self):
        for index, engine in enumerate(self.engines):
            await engine.start()
            self.servers.append(ReplicaServer(engine, coalesce_s=self.coalesce_s))
            self.up(index)
        return self

    def up(self, index):
        server = self.servers[index]
        server.connect("w", lambda message, index=index: self.pool.receive(index, message))

        def send(message):
            self.messages.append(message)
            asyncio.get_running_loop().call_soon(server.receive, "w", message, self.group)

        self.pool.replica_up(index, send)


def run(body, **options):
    """Run a test's body with a started cluster."""

    async def main():
        async with asyncio.TaskGroup() as group:
            return await body(await Cluster(group, **options).start())

    return asyncio.run(main())


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=9), st.integers(0, 9), st.integers(0, 3)),
        max_size=5,
    )
)
def test_requests_survive_the_wire(items):
    """
    What is unpacked is what was packed: new tokens, seeds and limits of each request.
    """
    sent = [
        (request(i, ids, f"t{i}", seed=seed, max_tokens=seed + 1), min(known, len(ids)))
        for i, (ids, known, seed) in enumerate(items)
    ]
    got = list(unpack_requests(pack_requests(sent)))

    assert [u.request_id for u in got] == [r.request_id for r, _ in sent]
    assert [u.new_ids.tolist() for u in got] == [r.token_ids[known:].tolist() for r, known in sent]
    assert [u.sampling for u in got] == [r.sampling for r, _ in sent]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.lists(st.integers(0, 99), max_size=9), st.sampled_from(FinishReason)), max_size=5))
def test_results_survive_the_wire(items):
    """
    Ids, log-probabilities, reasons and versions come back as they were.
    """
    sent = [
        (
            f"r{i}",
            GenerateResult(
                token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason=reason, weight_version=i, stop_reason=i
            ),
        )
        for i, (ids, reason) in enumerate(items)
    ]
    got = list(unpack_results(pack_results(sent, load=ReplicaLoad())))

    assert [(k, r.token_ids.tolist(), r.logprobs.tolist(), r.finish_reason, r.weight_version) for k, r in got] == [
        (k, r.token_ids.tolist(), r.logprobs.tolist(), r.finish_reason, r.weight_version) for k, r in sent
    ]


def test_only_new_tokens_travel():
    """
    After the first turn a request carries what was appended since, and the engine sees the whole context.
    """

    async def body(cluster):
        ids = np.arange(50, dtype=np.int32)
        for turn in range(4):
            result = await cluster.pool.generate(request(turn, ids))
            ids = np.concatenate([ids, result.token_ids, np.array([7, 8, 9], np.int32)])
        return cluster

    cluster = run(body)
    seen = [r for engine in cluster.engines for r in engine.requests]

    assert [len(m.token_ids) for m in cluster.messages if m.request_ids] == [50, 3, 3, 3]
    assert len(seen) == 4
    assert seen[-1].token_ids[-3:].tolist() == [7, 8, 9]
    assert seen[-1].token_ids[:50].tolist() == list(range(50))


def test_an_answer_does_not_wait_when_no_other_can_come():
    """
    A replica with nothing else to do sends at once, however long its messages may wait for each other.
    """

    async def body(cluster):
        async with asyncio.timeout(30):
            return [await cluster.pool.generate(request(turn, [1, 2, 3], f"t{turn}")) for turn in range(5)]

    assert len(run(body, coalesce_s=3600.0)) == 5


def test_what_an_episode_left_is_forgotten_with_it():
    """
    The trajectories of one episode are forgotten by the worker and the replica, those of others are not.
    """

    async def body(cluster):
        for turn, name in enumerate(("e", "e/1", "e/2", "e2", "f/1")):
            await cluster.pool.generate(request(turn, [1, 2, 3], name))
        cluster.pool.release("e")
        await asyncio.sleep(0.05)
        return cluster

    cluster = run(body)
    assert sorted(name for server in cluster.servers for name in server._contexts) == ["e2", "f/1"]
    assert sorted(name for m in cluster.messages for name in m.released) == ["e", "e/1", "e/2"]


def test_requests_of_one_tick_are_one_message():
    """
    Many episodes that ask at once cost a message per replica.
    """

    async def body(cluster):
        async with asyncio.TaskGroup() as group:
            for i in range(40):
                group.create_task(cluster.pool.generate(request(i, [1, 2, i], f"t{i}")))
        return [len(m.request_ids) for m in cluster.messages]

    assert run(body) == [20, 20]


def test_answers_equal_those_of_a_direct_call():
    """
    The wire changes nothing in what an engine says.
    """

    async def body(cluster):
        direct = ScriptedEngine(policy=POLICY)
        await direct.start()
        for i in range(10):
            one = request(i, [1, i], f"t{i}", seed=i)
            through, expected = await cluster.pool.generate(one), await direct.generate(one)
            assert through.token_ids.tolist() == expected.token_ids.tolist()
            assert through.logprobs.tolist() == expected.logprobs.tolist()

    run(body)


def test_a_replica_that_forgot_gets_the_whole_context():
    """
    A server that does not hold a context says so, and the request is sent again whole.
    """

    async def body(cluster):
        first = await cluster.pool.generate(request(0, [1, 2, 3]))
        cluster.servers[0]._contexts.clear()
        ids = [1, 2, 3, *first.token_ids.tolist(), 9]
        await cluster.pool.generate(request(1, ids))
        return cluster, ids

    cluster, ids = run(body, num_replicas=1)

    assert cluster.engines[0].requests[-1].token_ids.tolist() == ids
    assert [len(m.token_ids) for m in cluster.messages] == [3, 1, len(ids)]


def test_requests_go_on_when_their_replica_dies():
    """
    What was in flight is asked elsewhere, with the whole context, and the answer is the same.
    """

    async def body(cluster):
        pending = [asyncio.ensure_future(cluster.pool.generate(request(i, [1, i], f"t{i}", seed=i))) for i in range(8)]
        await asyncio.sleep(0.01)
        cluster.pool.replica_down(0, "killed")
        results = [await p for p in pending]
        return cluster.pool.num_moves, [r.token_ids.tolist() for r in results]

    moves, answers = run(body, latency_s=0.05)
    assert moves == 4
    assert answers == [a for _, a in [(0, x) for x in run(lambda c: _direct(c), num_replicas=1)]]


async def _direct(cluster):
    results = [await cluster.pool.generate(request(i, [1, i], f"t{i}", seed=i)) for i in range(8)]
    return [r.token_ids.tolist() for r in results]


def test_all_replicas_dead_is_a_clear_error():
    """
    After waiting for one to come back, requests fail with the last reason; at once when none will.
    """

    async def body(cluster):
        for index in (0, 1):
            cluster.pool.replica_down(index, "out of memory")
        with pytest.raises(EngineError, match="all 2 replicas are dead: out of memory"):
            await cluster.pool.generate(request(0, [1]))
        cluster.pool.give_up("gone for good")
        with pytest.raises(EngineError, match="gone for good"):
            await cluster.pool.generate(request(1, [1]))

    run(body)


def test_a_restarted_replica_is_used_again():
    """
    A request waits for a replica that comes back in time.
    """

    async def body(cluster):
        cluster.pool.replica_down(0, "restarting")
        asyncio.get_running_loop().call_later(0.05, cluster.up, 0)
        return await cluster.pool.generate(request(0, [1, 2]))

    assert len(run(body, num_replicas=1).token_ids) > 0


def test_an_engine_error_reaches_its_request_alone():
    """
    One refused request does not disturb its neighbours.
    """

    async def body(cluster):
        answers = await asyncio.gather(  # noqa: TID251 - the failures are the point
            *(cluster.pool.generate(request(i, [1], f"t{i}")) for i in range(3)), return_exceptions=True
        )
        return [type(a).__name__ for a in answers]

    assert run(body, num_replicas=1, failures={1: Failure.ERROR}) == ["GenerateResult", "EngineError", "GenerateResult"]


def test_abort_and_cancel_reach_the_engine():
    """
    An aborted request returns what it had; a cancelled one frees its slot.
    """

    async def body(cluster):
        slow = asyncio.ensure_future(cluster.pool.generate(request(0, [1], "a", max_tokens=20)))
        gone = asyncio.ensure_future(cluster.pool.generate(request(1, [1], "b", max_tokens=20)))
        await asyncio.sleep(0.03)
        await cluster.pool.abort("r0")
        gone.cancel()
        result = await slow
        await asyncio.sleep(0.02)
        return result.finish_reason, cluster.engines[0].stats()["num_running"]

    assert run(body, num_replicas=1, token_latency_s=0.02) == (FinishReason.ABORT, 0)


def test_released_contexts_are_forgotten():
    """
    What an episode leaves behind at its replica goes with its end, paths included.
    """

    async def body(cluster):
        await cluster.pool.generate(request(0, [1], "a"))
        await cluster.pool.generate(request(1, [1], "a/0.1.0"))
        await cluster.pool.generate(request(2, [1], "b"))
        cluster.pool.release("a")
        await asyncio.sleep(0.01)
        return set(cluster.servers[0]._contexts)

    assert run(body, num_replicas=1) == {"b"}


def test_nothing_is_kept_of_requests_that_were_cancelled_or_refused():
    """
    An episode that ends while its request is cancelled, or refused, leaves no context at the replica.
    """

    async def body(cluster):
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(cluster.pool.generate(request(1, [1, 2], "cut")))
            await asyncio.sleep(0.05)
            waiting.cancel()
        with pytest.raises(EngineError):
            await cluster.pool.generate(request(2, [1, 2], "refused", stop=("no such thing",)))
        for key in ("cut", "refused"):
            cluster.pool.release(key)
        await asyncio.sleep(0.05)
        return [server._contexts for server in cluster.servers]

    assert run(body, num_replicas=1, latency_s=30.0) == [{}]


def test_a_worker_that_has_gone_leaves_no_contexts():
    """
    What a dead worker had at a replica is forgotten with it, and what others have is not.
    """

    async def body(cluster):
        server = cluster.servers[0]
        server.connect("other", lambda message: None)
        server.receive("other", pack_requests([(request(1, [1, 2], "theirs"), 0)]), cluster.group)
        await cluster.pool.generate(request(2, [1, 2], "mine"))
        server.disconnect("other")
        return list(server._contexts)

    assert ["mine"] == run(body, num_replicas=1)


def test_sleep_is_heard_before_anything_else():
    """
    A request that follows the announcement meets what was announced: no turn of the event loop lies between.
    """

    async def body(cluster):
        for server in cluster.servers:
            server.announce(available=False)
        with pytest.raises(AsleepError):
            await cluster.pool.generate(request(0, np.arange(3, dtype=np.int32)))
        for server in cluster.servers:
            server.announce(available=True)
        return await cluster.pool.generate(request(1, np.arange(3, dtype=np.int32)))

    assert len(run(body).token_ids)
