"""Pictures between workers and replicas, without Ray: each comes once for each life of a replica, to every request."""

import asyncio
import pickle
from collections import Counter

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.media import Picture, PlacedPicture
from turnwise.runtime.remote.contexts import ProvedPrefix
from turnwise.runtime.remote.picture_store import PictureStore
from turnwise.runtime.remote.replica_pool import ReplicaPool
from turnwise.runtime.remote.replica_server import ReplicaServer
from turnwise.runtime.remote.wire import IllustratedRequests, SentPicture, ToReplica, pack_requests, unpack_requests
from turnwise.types import FinishReason, GenerateRequest, SamplingParams
from turnwise_testing.engines.scripted import RandomPolicy, ScriptedEngine

POLICY = RandomPolicy(seed=1, vocab_size=200, end_token_id=5, mean_tokens=6)
SAMPLING = SamplingParams(max_tokens=20, stop_token_ids=(5,))
PICTURES = [Picture(data=bytes([number]) * 50, media_type="image/png") for number in range(4)]
NUM_WORKERS = NUM_REPLICAS = 2


def request(name, shown, replica=0, trajectory=None):
    """Return a request of a context of 8 tokens, of which each picture has two."""
    pictures = tuple(
        PlacedPicture(start=2 * place, num_tokens=2, picture=PICTURES[number]) for place, number in enumerate(shown)
    )
    return GenerateRequest(
        request_id=name,
        trajectory_id=trajectory or name,
        token_ids=np.arange(8),
        sampling=SAMPLING,
        pictures=pictures,
        group_id=str(replica),
    )


def places(pictures):
    return [(each.start, each.num_tokens, each.picture.name, each.picture.data) for each in pictures]


class Chosen:
    """Sends a request to the replica that its group names, or to one that lives."""

    def choose(self, request, replicas):
        index = int(request.group_id)
        return index if replicas[index].available else 1 - index

    def release(self, trajectory_id):
        """Forget nothing."""


class Seeing(ScriptedEngine):
    """Notes the pictures of its requests."""

    def __init__(self):
        super().__init__(policy=POLICY)
        self.capabilities = evolve(self.capabilities, pictures=True)
        self.seen = {}

    async def generate(self, request):
        self.seen[request.request_id] = places(request.pictures)
        return await super().generate(request)


class Cluster:
    """Workers and replicas whose messages are pickled, as between processes, and cross in later passes of the loop."""

    def __init__(self, group, max_bytes=10**9):
        self.group, self.max_bytes = group, max_bytes
        self.pools = [ReplicaPool(Chosen(), Seeing().capabilities, NUM_REPLICAS) for _ in range(NUM_WORKERS)]
        self.engines = [Seeing() for _ in range(NUM_REPLICAS)]
        self.servers = [None] * NUM_REPLICAS
        self.sent = Counter()  # by life of a replica, and name
        self.lives = Counter()
        self.messages = []

    async def start(self):
        for index, engine in enumerate(self.engines):
            await engine.start()
            self.up(index)
        return self

    def up(self, index):
        """Start a replica that holds nothing, and connect the workers."""
        self.lives[index] += 1
        # The processes of a run hold their own pictures; these share one.
        pictures = PictureStore(self.max_bytes, find_in_use=lambda name: None)
        server = self.servers[index] = ReplicaServer(self.engines[index], pictures=pictures)
        for worker in range(NUM_WORKERS):
            self.connect(worker, index, server)

    def connect(self, worker, index, server):
        pool, loop = self.pools[worker], asyncio.get_running_loop()

        def send(message):
            packed = pickle.dumps(message)
            self.messages.append((message, len(packed)))
            if isinstance(message, SentPicture):
                self.sent[index, self.lives[index], message.picture.name] += 1
            loop.call_soon(self.deliver, worker, index, server, packed)

        def answer(message):
            loop.call_soon(self.answer, worker, index, server, pickle.dumps(message))

        server.connect(worker, answer)
        pool.replica_up(index, send)

    def deliver(self, worker, index, server, packed):
        if self.servers[index] is server:
            server.receive(worker, pickle.loads(packed), self.group)

    def answer(self, worker, index, server, packed):
        if self.servers[index] is server:
            self.pools[worker].receive(index, pickle.loads(packed))

    def restart(self, index):
        """Let a replica die with all that it holds, and start another in its place."""
        for worker, pool in enumerate(self.pools):
            self.servers[index].disconnect(worker)
            pool.replica_down(index, "it was killed", left=True)
        self.up(index)


def run(body, **options):
    async def main():
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            return await body(await Cluster(group, **options).start())

    return asyncio.run(main())


shown = st.lists(st.integers(0, len(PICTURES) - 1), max_size=4)
items = st.lists(st.tuples(shown, st.integers(0, 3)), max_size=6)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, NUM_WORKERS - 1), st.integers(0, NUM_REPLICAS - 1), shown),
        st.tuples(st.just("pass"), st.integers(1, 12)),
        st.tuples(st.just("restart"), st.integers(0, NUM_REPLICAS - 1)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
    ),
    max_size=25,
)


@settings(max_examples=50)
@given(items)
def test_pictures_are_unchanged_by_the_wire_format(items):
    """A message has their places and names; one without pictures is of the class without them."""
    requests = [(request(f"r{i}", shown), ProvedPrefix(known, b"p")) for i, (shown, known) in enumerate(items)]
    packed = pack_requests(requests)
    assert isinstance(packed, IllustratedRequests) == any(shown for shown, _known in items)
    got = list(unpack_requests(pickle.loads(pickle.dumps(packed))))
    assert [[p[:3] for p in places(r.pictures)] for r, _ in requests] == [list(u.pictures) for u in got]
    assert [r.token_ids[known.num_tokens :].tolist() for r, known in requests] == [u.new_ids.tolist() for u in got]


async def act(cluster, actions):
    """Do some actions, and return the requests with their tasks."""
    tasks = []
    for kind, *values in actions:
        match kind, values:
            case "ask", (worker, replica, shown):
                asked = request(f"w{worker}-{len(tasks)}", shown, replica)
                tasks.append((asked, asyncio.ensure_future(cluster.pools[worker].generate(asked))))
            case "pass", (count,):
                for _ in range(count):
                    await asyncio.sleep(0)
            case "restart", (replica,):
                cluster.restart(replica)
            case "cancel", (number,) if number < len(tasks):
                tasks[number][1].cancel()
    return tasks


@settings(max_examples=200, deadline=None)
@given(actions, st.sampled_from([10**9, 120, 0]))
def test_any_order_of_requests(actions, max_bytes):
    """Each request that stays gets exactly its pictures, and a replica nothing twice that it may keep."""

    async def body(cluster):
        tasks = await act(cluster, actions)
        if tasks:
            await asyncio.wait([task for _asked, task in tasks])
        seen = cluster.engines[0].seen | cluster.engines[1].seen
        for asked, task in tasks:
            if not task.cancelled():
                assert task.result().finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
                assert places(asked.pictures) == seen[asked.request_id]
        while any(server._running for server in cluster.servers):  # noqa: ASYNC110 - cancelled ones end soon
            await asyncio.sleep(0)
        for server in cluster.servers:
            assert server.pictures.num_bytes <= max_bytes
            assert not server.pictures._wanted
        return cluster.sent

    sent = run(body, max_bytes=max_bytes)
    if max_bytes == 10**9 and not any(kind == "cancel" for kind, *_ in actions):
        assert set(sent.values()) <= {1}


turns = st.lists(st.integers(0, 3), max_size=24)


@settings(max_examples=100, deadline=None)
@given(st.lists(shown, min_size=4, max_size=4), turns, st.sampled_from([10**9, 120, 0]))
def test_a_trajectory_keeps_its_pictures(shown, turns, max_bytes):
    """Turns of trajectories that take turns send no picture again, however few the store holds."""

    async def body(cluster):
        counts = Counter()
        for number in turns:
            counts[number] += 1
            asked = request(f"t{number}-{counts[number]}", shown[number], trajectory=f"t{number}")
            asked = evolve(asked, token_ids=np.arange(6 + 2 * counts[number]))
            await cluster.pools[number % NUM_WORKERS].generate(asked)
            assert places(asked.pictures) == cluster.engines[0].seen[asked.request_id]
        return cluster.sent

    sent = run(body, max_bytes=max_bytes)
    live = Counter(picture for number in set(turns) for picture in set(shown[number]))
    for number, picture in enumerate(PICTURES):
        assert sent[0, 1, picture.name] <= (1 if max_bytes == 10**9 else live[number])


def test_workers_share_the_pictures_of_a_replica():
    """Forty requests of two workers send each of four pictures once, and then names alone."""

    async def body(cluster):
        async with asyncio.TaskGroup() as group:
            for number in range(40):
                pool = cluster.pools[number % 2]
                group.create_task(pool.generate(request(f"r{number}", (0, 1, 2, 3))))
        return cluster.sent, [pool.num_sent_pictures for pool in cluster.pools]

    sent, counts = run(body)
    assert {(0, 1, picture.name): 1 for picture in PICTURES} == sent
    assert len(PICTURES) == sum(counts)


def test_a_killed_replica_asks_again():
    """The next request brings the pictures to the process that replaces it."""

    async def body(cluster):
        await cluster.pools[0].generate(request("a", (0, 1)))
        waiting = asyncio.ensure_future(cluster.pools[0].generate(request("b", (0, 1, 2))))
        cluster.restart(0)
        await waiting
        return cluster.sent, cluster.engines[0].seen["b"]

    sent, seen = run(body)
    assert places(request("b", (0, 1, 2)).pictures) == seen
    assert {(0, 1): 2, (0, 2): 3} == Counter((replica, life) for replica, life, _name in sent.elements())


def test_another_worker_is_asked_when_the_first_has_left():
    """A request does not wait for a worker that was lost with the picture."""

    async def body(cluster):
        server = cluster.servers[0]
        cluster.deliver = lambda worker, *rest: worker == 1 and Cluster.deliver(cluster, worker, *rest)
        server.receive(0, pack_requests([(request("lost", (0,)), ProvedPrefix())]), cluster.group)
        await asyncio.sleep(0)
        waiting = asyncio.ensure_future(cluster.pools[1].generate(request("stays", (0,))))
        for _ in range(9):
            await asyncio.sleep(0)
        assert not waiting.done()
        server.disconnect(0)
        await waiting
        return cluster.engines[0].seen

    assert {"stays": places(request("stays", (0,)).pictures)} == run(body)


def test_an_abort_ends_the_wait_for_pictures():
    """The request ends without the engine, and the picture is not wanted any more."""

    async def body(cluster):
        cluster.answer = lambda worker, index, server, packed: None  # no picture is ever asked for
        waiting = asyncio.ensure_future(cluster.pools[0].generate(request("a", (0,))))
        while not cluster.servers[0].pictures._wanted:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
        del cluster.answer
        await cluster.pools[0].abort("a")
        return await waiting, cluster.servers[0].pictures._wanted, cluster.engines[0].seen

    result, wanted, seen = run(body)
    assert (FinishReason.ABORT, {}, {}) == (result.finish_reason, wanted, seen)


@pytest.mark.parametrize("count", [1, 3])
def test_messages_of_text_are_as_before(count):
    """They are of the same class, with the same columns, so they have as many bytes as without pictures."""
    message = pack_requests([(request(f"r{number}", ()), ProvedPrefix()) for number in range(count)])
    assert type(message) is ToReplica
    assert b"picture" not in pickle.dumps(message)


def test_bytes_of_a_message():
    """A request names its pictures; each costs at most 120 bytes beside the tokens."""
    with_names, text = (
        len(pickle.dumps(pack_requests([(request("r", shown), ProvedPrefix())]))) for shown in ((0, 1, 2, 3), ())
    )
    assert with_names - text < 4 * 120 + 300
    assert pack_requests([(request("r", (0,)), ProvedPrefix())]).num_bytes == 8 * 4 + 2 * 4 + 4 * 4


def test_the_store_forgets_what_was_used_longest_ago():
    """It holds at most its bytes, and a picture in use elsewhere in the process is kept again."""
    store = PictureStore(max_bytes=100, find_in_use={PICTURES[0].name: PICTURES[0]}.get)
    for picture in PICTURES[:2]:
        store.add(picture)

    async def body():
        asked = []
        found = await store.find([PICTURES[0].name], asked.append)
        store.add(PICTURES[2])  # forgets 1
        again = await store.find([PICTURES[0].name], asked.append)
        waiting = asyncio.ensure_future(store.find([PICTURES[1].name], asked.append))
        await asyncio.sleep(0)
        store.add(PICTURES[1])
        return found, again, await waiting, asked

    found, again, last, asked = asyncio.run(body())
    assert found == again == {PICTURES[0].name: PICTURES[0]}
    assert ({PICTURES[1].name: PICTURES[1]}, [PICTURES[1].name]) == (last, asked)
    assert store.num_bytes == 100
