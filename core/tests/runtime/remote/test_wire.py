"""Requests between workers and replicas, in one process: new tokens only, coalescing, and failures."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import AsleepError, EngineError, GrammarError, ToolError
from turnwise.protocols import ReplicaLoad
from turnwise.runtime.remote.contexts import Context, ProvedPrefix, SentContext
from turnwise.runtime.remote.replica_pool import ReplicaPool
from turnwise.runtime.remote.replica_server import ReplicaServer
from turnwise.runtime.remote.wire import pack_requests, pack_results, unpack_requests, unpack_results
from turnwise.types import FinishReason, GenerateRequest, GenerateResult, SamplingParams
from turnwise_routers import LeastTokens
from turnwise_testing.engines.scripted import Failure, RandomPolicy, ScriptedEngine

POLICY = RandomPolicy(seed=1, vocab_size=200, end_token_id=5, mean_tokens=6)
SAMPLING = SamplingParams(max_tokens=20, stop_token_ids=(5,))


def request(number, ids, trajectory="t", **sampling):
    return GenerateRequest(
        request_id=f"r{number}", trajectory_id=trajectory, token_ids=ids, sampling=SAMPLING.with_(**sampling)
    )


class Cluster:
    """Replicas and the pool of one worker, connected without Ray; messages pass through the event loop."""

    def __init__(self, group, num_replicas=2, coalesce_s=0.0, **engine):
        self.group = group
        self.coalesce_s = coalesce_s
        self.pool = ReplicaPool(LeastTokens(), ScriptedEngine().capabilities, num_replicas, restart_timeout_s=0.2)
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
        server.connect(0, lambda message, index=index: self.pool.receive(index, message))

        def send(message):
            self.messages.append(message)
            asyncio.get_running_loop().call_soon(server.receive, 0, message, self.group)

        self.pool.replica_up(index, send)


def run(body, **options):
    """Run the body of a test with a started cluster."""

    async def main():
        async with asyncio.TaskGroup() as group:
            return await body(await Cluster(group, **options).start())

    return asyncio.run(main())


def contexts(server):
    """Return the ids of the trajectories whose contexts a replica holds."""
    return sorted(name for client in server._clients.values() for name in client.contexts)


async def until(condition):
    """Wait for a condition, and look at it in every pass of the event loop."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the state of engines and servers has no event
            await asyncio.sleep(0)


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=9), st.integers(0, 9), st.integers(0, 3)),
        max_size=5,
    )
)
def test_requests_are_unchanged_by_the_wire_format(items):
    """New tokens, seeds and limits of every request are equal after packing and unpacking."""
    sent = [
        (request(i, ids, f"t{i}", seed=seed, max_tokens=seed + 1), ProvedPrefix(min(known, len(ids)), bytes([i])))
        for i, (ids, known, seed) in enumerate(items)
    ]
    got = list(unpack_requests(pack_requests(sent)))

    assert [u.request_id for u in got] == [r.request_id for r, _ in sent]
    assert [u.new_ids.tolist() for u in got] == [r.token_ids[known.num_tokens :].tolist() for r, known in sent]
    assert [u.prefix for u in got] == [known for _, known in sent]
    assert [u.sampling for u in got] == [r.sampling for r, _ in sent]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.lists(st.integers(0, 99), max_size=9), st.sampled_from(FinishReason)), max_size=5))
def test_results_are_unchanged_by_the_wire_format(items):
    """Ids, log-probabilities, reasons and versions are equal after packing and unpacking."""
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
    """After the first turn a request contains only the appended tokens, and the engine gets the whole context."""

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


def test_an_idle_replica_sends_at_once():
    """A result does not wait for others if no other request runs."""

    async def body(cluster):
        async with asyncio.timeout(30):
            return [await cluster.pool.generate(request(turn, [1, 2, 3], f"t{turn}")) for turn in range(5)]

    assert len(run(body, coalesce_s=3600.0)) == 5


def test_the_contexts_of_an_episode_are_released_with_it():
    """Worker and replicas forget all trajectories of one episode, and none of the others."""

    async def body(cluster):
        for turn, name in enumerate(("e", "e/1", "e/2", "e2", "f/1")):
            await cluster.pool.generate(request(turn, [1, 2, 3], name))
        cluster.pool.release("e")
        await until(lambda: ["e2", "f/1"] == sorted(name for server in cluster.servers for name in contexts(server)))
        return cluster

    cluster = run(body)
    assert sorted(name for m in cluster.messages for name in m.released) == ["e", "e/1", "e/2"]


def test_requests_of_one_tick_are_one_message():
    """Simultaneous requests of many episodes cost one message per replica."""

    async def body(cluster):
        async with asyncio.TaskGroup() as group:
            for i in range(40):
                group.create_task(cluster.pool.generate(request(i, [1, 2, i], f"t{i}")))
        return [len(m.request_ids) for m in cluster.messages]

    assert run(body) == [20, 20]


def test_results_equal_those_of_a_direct_call():
    """A replica returns the same ids and log-probabilities as its engine."""

    async def body(cluster):
        direct = ScriptedEngine(policy=POLICY)
        await direct.start()
        for i in range(10):
            one = request(i, [1, i], f"t{i}", seed=i)
            through, expected = await cluster.pool.generate(one), await direct.generate(one)
            assert through.token_ids.tolist() == expected.token_ids.tolist()
            assert through.logprobs.tolist() == expected.logprobs.tolist()

    run(body)


def test_a_replica_without_the_context_gets_all_of_it():
    """If the server does not hold a context, the request is sent again with all tokens."""

    async def body(cluster):
        first = await cluster.pool.generate(request(0, [1, 2, 3]))
        cluster.servers[0]._clients[0].contexts.clear()
        ids = [1, 2, 3, *first.token_ids.tolist(), 9]
        await cluster.pool.generate(request(1, ids))
        return cluster, ids

    cluster, ids = run(body, num_replicas=1)

    assert cluster.engines[0].requests[-1].token_ids.tolist() == ids
    assert [len(m.token_ids) for m in cluster.messages] == [3, 1, len(ids)]


def test_requests_of_a_dead_replica_migrate():
    """Requests in flight are repeated on another replica with the whole context, and the results are the same."""

    async def body(cluster):
        pending = [asyncio.ensure_future(cluster.pool.generate(request(i, [1, i], f"t{i}", seed=i))) for i in range(8)]
        await until(lambda: 8 == sum(engine.stats()["num_running"] for engine in cluster.engines))
        cluster.pool.replica_down(0, "killed")
        results = [await p for p in pending]
        return cluster.pool.num_resent, cluster.pool.num_migrations, [r.token_ids.tolist() for r in results]

    num_resent, num_migrations, results = run(body, latency_s=1.0)
    assert (num_resent, num_migrations) == (4, 4)
    assert results == run(_direct, num_replicas=1)


async def _direct(cluster):
    results = [await cluster.pool.generate(request(i, [1, i], f"t{i}", seed=i)) for i in range(8)]
    return [r.token_ids.tolist() for r in results]


class Alternating:
    """Chooses the replicas in turns."""

    def __init__(self):
        self.number = 0

    def choose(self, request, replicas):
        self.number += 1
        return self.number % len(replicas)

    def release(self, trajectory_id):
        """Forget nothing."""


def test_each_move_to_another_replica_is_a_migration():
    """A router that moves an episode without a death counts too: the number is that of the events `migrated`."""

    async def body(cluster):
        cluster.pool.router = Alternating()
        for number in range(6):
            await cluster.pool.generate(request(number, [1, number], "t"))
        return cluster.pool.num_resent, cluster.pool.num_migrations

    num_resent, num_migrations = run(body)
    assert (num_resent, num_migrations) == (0, 5)


def test_all_replicas_dead_is_a_clear_error():
    """Requests fail with the last reason after a wait for a restart, or at once if none will follow."""

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
    """A request waits while the only replica restarts."""

    async def body(cluster):
        cluster.pool.replica_down(0, "restarting")
        waiting = asyncio.ensure_future(cluster.pool.generate(request(0, [1, 0], "t0", seed=0)))
        await asyncio.sleep(0)
        assert not cluster.messages  # nothing was sent to the dead one
        cluster.up(0)
        return (await waiting).token_ids.tolist()

    assert run(body, num_replicas=1) == run(_direct, num_replicas=1)[0]


def test_a_retired_replica_finishes_its_requests():
    """It gets no more of them; a request without another replica waits for one, which may have a new index."""

    async def body(cluster):
        pending = [asyncio.ensure_future(cluster.pool.generate(request(i, [1, i], f"t{i}", seed=i))) for i in range(8)]
        await until(lambda: 8 == sum(engine.stats()["num_running"] for engine in cluster.engines))
        for index in (0, 1):
            await cluster.pool.retire(index)
        results = [await p for p in pending]
        waiting = asyncio.ensure_future(cluster.pool.generate(request(8, [1, 8], "t8", seed=8)))
        await asyncio.sleep(0)
        cluster.pool.replica_up(3, lambda _message: None)
        await asyncio.sleep(0)
        assert not waiting.done()
        cluster.up(0)
        cluster.pool.replica_down(3, "it left", left=True)
        await waiting
        return cluster.pool.num_resent, [r.token_ids.tolist() for r in results]

    num_resent, results = run(body, latency_s=1.0)
    assert num_resent <= 1  # the request that waited, if it was sent to the replica that never answers
    assert results == run(_direct, num_replicas=1)


def test_requests_that_are_left_at_a_retired_replica_are_no_suspects():
    """They run again on others, however often that happens, and side by side."""

    async def body(cluster):
        pending = [asyncio.ensure_future(cluster.pool.generate(request(i, [1, i], f"t{i}", seed=i))) for i in range(8)]
        for latency_s in (1000.0, 1000.0, 0.0):
            await until(lambda: 8 == cluster.engines[0].stats()["num_running"])
            leaving = asyncio.ensure_future(cluster.pool.retire(0))
            await asyncio.sleep(0)
            cluster.pool.replica_down(0, "it did not finish in time", left=True)
            await leaving
            ids = [f"r{i}" for i in range(8)]  # as at the end of the process
            cluster.servers[0].receive(0, pack_requests([], cancelled=ids), cluster.group)
            cluster.engines[0] = ScriptedEngine(policy=POLICY, latency_s=latency_s)
            await cluster.engines[0].start()
            cluster.servers[0] = ReplicaServer(cluster.engines[0])
            cluster.up(0)
        results = [await p for p in pending]
        suspects = [name for message in cluster.messages for name in message.suspects]
        return cluster.pool.num_resent, suspects, [r.token_ids.tolist() for r in results]

    num_resent, suspects, results = run(body, num_replicas=1, latency_s=1000.0)
    assert (24, []) == (num_resent, suspects)
    assert results == run(_direct, num_replicas=1)


def test_an_engine_error_reaches_its_request_alone():
    """One refused request does not affect the others of its message."""

    async def body(cluster):
        answers = await asyncio.gather(  # noqa: TID251 - the failures are the point
            *(cluster.pool.generate(request(i, [1], f"t{i}")) for i in range(3)), return_exceptions=True
        )
        return [type(a).__name__ for a in answers]

    assert run(body, num_replicas=1, failures={1: Failure.ERROR}) == ["GenerateResult", "EngineError", "GenerateResult"]


def test_abort_and_cancel_reach_the_engine():
    """An aborted request returns its tokens so far; a cancelled one frees its slot."""

    async def body(cluster):
        slow = asyncio.ensure_future(cluster.pool.generate(request(0, [1], "a", max_tokens=20)))
        gone = asyncio.ensure_future(cluster.pool.generate(request(1, [1], "b", max_tokens=20)))
        engine = cluster.engines[0]
        await until(lambda: engine.stats()["num_running"] == 2)
        await cluster.pool.abort("r0")
        gone.cancel()
        result = await slow
        await until(lambda: engine.stats()["num_running"] == 0)
        return result.finish_reason

    assert FinishReason.ABORT == run(body, num_replicas=1, token_latency_s=30.0)


def test_a_context_continues_only_what_it_holds():
    """With another proof, or before the end of the last request, it refuses, and views of engines stay as they were."""
    context = Context.start("a", np.arange(5, dtype=np.int32))
    view = context.view()
    context.add_result("a", np.array([5, 6, 7], np.int32))
    sent = SentContext.start(request(0, range(5)))
    sent.result = np.array([5, 6, 7], np.int32)
    kept = sent.advance(request(1, [0, 1, 2, 3, 4, 5, 6, 9]))

    refused = [ProvedPrefix(8, kept.proof), ProvedPrefix(7, b"?" * 16), ProvedPrefix(4, kept.proof)]
    assert [False] * 3 == [context.advance("b", each, np.array([9], np.int32)) for each in refused]
    assert 7 == kept.num_tokens
    assert context.advance("b", kept, np.array([9], np.int32))
    assert [0, 1, 2, 3, 4, 5, 6, 9] == context.view().tolist()
    context.add_result("a", np.array([1], np.int32))  # of the earlier request, which ends late
    context.add_result("b", np.array([2], np.int32))
    assert list(range(5)) == view.tolist()
    assert sent.advance(request(2, [0, 1, 2, 3, 4, 5, 7, 9, 9])) is None


def test_released_contexts_are_forgotten():
    """The replica forgets an episode and its paths at the end."""

    async def body(cluster):
        await cluster.pool.generate(request(0, [1], "a"))
        await cluster.pool.generate(request(1, [1], "a/0.1.0"))
        await cluster.pool.generate(request(2, [1], "b"))
        cluster.pool.release("a")
        await until(lambda: ["b"] == contexts(cluster.servers[0]))

    run(body, num_replicas=1)


@pytest.mark.parametrize("place", ["queue of the replica", "no replica", "a replica that dies"])
def test_an_abort_reaches_a_request_anywhere(place):
    """It ends a request that the engine does not have yet, or has no more, and nothing is sampled in vain."""

    async def body(cluster):
        (server,), (engine,) = cluster.servers, cluster.engines
        if place == "queue of the replica":
            cluster.servers[0] = server = ReplicaServer(engine, max_in_flight=1)
            cluster.up(0)
            first = asyncio.ensure_future(cluster.pool.generate(request(1, [1], "a", max_tokens=20)))
            await until(lambda: engine.stats()["num_running"] == 1)
        if place == "no replica":
            cluster.pool.restart_timeout_s = 1000.0
            cluster.pool.replica_down(0, "restarting")
        slow = asyncio.ensure_future(cluster.pool.generate(request(0, [1], "b", max_tokens=20)))
        await asyncio.sleep(0)
        if place == "a replica that dies":
            await until(lambda: engine.stats()["num_running"] == 1)
            cluster.pool._links[0].send = lambda _message: None  # it dies before it hears of the abort
        elif place == "queue of the replica":
            await until(lambda: len(server._running) == 2)
        await cluster.pool.abort("r0")
        if place == "a replica that dies":
            cluster.pool.replica_down(0, "killed")
            cluster.engines[0] = ScriptedEngine(policy=POLICY, token_latency_s=30.0)
            await cluster.engines[0].start()
            cluster.servers[0] = ReplicaServer(cluster.engines[0])
            cluster.up(0)
        async with asyncio.timeout(60):
            result = await slow
        if place == "queue of the replica":
            first.cancel()
        server.disconnect(0)
        return result.finish_reason, len(result.token_ids)

    assert (FinishReason.ABORT, 0) == run(body, num_replicas=1, token_latency_s=30.0)


class SlowEngine:
    """Ends a cancelled request only when it may."""

    def __init__(self):
        self.may_end, self.running = asyncio.Event(), 0

    async def generate(self, _request):
        self.running += 1
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            await self.may_end.wait()
            raise
        finally:
            self.running -= 1


def test_a_repeated_request_that_is_cancelled_leaves_the_first_one():
    """A third one waits for both, and no callback fails, however the two end."""

    async def body(cluster):
        failures, (server,) = [], cluster.servers
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context))
        for worker in (1, 2, 3):
            server.connect(worker, lambda message: None)
        message = pack_requests([(request(0, [1], "a", max_tokens=20), ProvedPrefix())])
        server.engine = engine = SlowEngine()
        server.receive(1, message, cluster.group)
        await until(lambda: engine.running)
        server.receive(2, message, cluster.group)
        await asyncio.sleep(0)
        server.disconnect(2)
        server.disconnect(1)
        for _ in range(5):
            await asyncio.sleep(0)
        server.receive(3, message, cluster.group)
        for _ in range(5):
            await asyncio.sleep(0)
        running = engine.running
        server.disconnect(3)
        engine.may_end.set()
        await until(lambda: not server._running)
        return running, failures

    assert (1, []) == run(body, num_replicas=1)


def test_cancelled_and_refused_requests_leave_no_context():
    """The replica holds nothing of an episode that ended with a cancelled or refused request."""

    async def body(cluster):
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(cluster.pool.generate(request(1, [1, 2], "cut")))
            await until(lambda: cluster.engines[0].stats()["num_running"] == 1)
            waiting.cancel()
        with pytest.raises(EngineError):
            await cluster.pool.generate(request(2, [1, 2], "refused", stop=("no such thing",)))
        for key in ("cut", "refused"):
            cluster.pool.release(key)
        await until(lambda: not contexts(cluster.servers[0]))

    run(body, num_replicas=1, latency_s=30.0)


def test_a_dead_worker_leaves_no_contexts():
    """A replica forgets the contexts of a dead worker, and no others."""

    async def body(cluster):
        server = cluster.servers[0]
        server.connect(1, lambda message: None)
        server.receive(1, pack_requests([(request(1, [1, 2], "theirs"), ProvedPrefix())]), cluster.group)
        await cluster.pool.generate(request(2, [1, 2], "mine"))
        server.disconnect(1)
        return contexts(server)

    assert ["mine"] == run(body, num_replicas=1)


def test_an_announcement_precedes_the_next_request():
    """A request after the announcement sees the new state, without a pass of the event loop in between."""

    async def body(cluster):
        for server in cluster.servers:
            server.sleep_state.mark_asleep(1)
            await server.announce()
        with pytest.raises(AsleepError):
            await cluster.pool.generate(request(0, np.arange(3, dtype=np.int32)))
        for server in cluster.servers:
            server.sleep_state.mark_awake("weights", "kv_cache")
            await server.announce()
        return (await cluster.pool.generate(request(1, [1, 0], "t0", seed=0))).token_ids.tolist()

    assert run(body) == run(_direct, num_replicas=1)[0]


class FailingEngine:
    """Fails the request `r0` with an error, and leaves all others to another engine."""

    def __init__(self, engine, error):
        self.engine, self.error = engine, error

    async def generate(self, given):
        if given.request_id == "r0":
            raise self.error
        return await self.engine.generate(given)

    def __getattr__(self, name):
        return getattr(self.engine, name)


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (EngineError("it failed"), EngineError, "it failed"),
        (GrammarError("it is too large"), GrammarError, "it is too large"),
        (ToolError("it is no engine's"), EngineError, "it is no engine's"),
        (ValueError("it is wrong"), EngineError, "ValueError: it is wrong"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_errors_of_a_request_keep_their_kind(raised, kind, text):
    """Those that a caller tells apart arrive as they were raised, and the next request is served."""

    async def body(cluster):
        cluster.servers[0].engine = FailingEngine(cluster.engines[0], raised)
        with pytest.raises(EngineError) as caught:
            await cluster.pool.generate(request(0, [1, 2]))
        await cluster.pool.generate(request(1, [1, 2]))
        return type(caught.value), str(caught.value)

    assert (kind, text) == run(body, num_replicas=1)
