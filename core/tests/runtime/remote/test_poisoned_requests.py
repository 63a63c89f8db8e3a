"""Requests that kill replicas: they fail, all others finish, and few of these run alone. Without Ray."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import EngineError
from turnwise.runtime.remote.admission import Admission
from turnwise.runtime.remote.replica_pool import PoisonedRequestError, ReplicaPool
from turnwise.runtime.remote.replica_server import ReplicaServer
from turnwise.types import Capabilities, FinishReason, GenerateRequest, GenerateResult, SamplingParams
from turnwise_routers import LeastTokens

KILLER = "killer"


def make_request(name):
    sampling = SamplingParams(max_tokens=1)
    return GenerateRequest(request_id=f"r-{name}", trajectory_id=name, token_ids=[1, 2, 3], sampling=sampling)


async def until(condition):
    """Let the event loop run until a condition holds."""
    while not condition():  # noqa: ASYNC110 - conditions of plain objects, which set no event
        await asyncio.sleep(0)


class Engine:
    """Runs each request for some passes of the event loop; a request of a killer ends its replica at the end."""

    def __init__(self, cluster, index):
        self.cluster, self.index, self.running = cluster, index, set()

    async def generate(self, request):
        name = request.trajectory_id
        self.running.add(name)
        others = set(self.running)
        for _ in range(8):
            await asyncio.sleep(0)
            others |= self.running
        if name.startswith(KILLER):
            if self.cluster.has(self):  # or another killer has just ended the process
                self.cluster.die(self.index)
            await asyncio.Event().wait()
        self.running.discard(name)
        self.cluster.runs[name].append(len(others) == 1)
        return GenerateResult(token_ids=[7], logprobs=[-0.5], finish_reason=FinishReason.STOP)

    async def abort(self, request_id):
        raise NotImplementedError


class Cluster:
    """
    Replicas that can die, and the pools of some workers, in one event loop.

    Attributes:
        runs: whether each run of a request was alone, by name.
        deaths: of replicas.
    """

    def __init__(self, group, *, workers, replicas, coalesce_s=0.0):
        self.group, self.deaths, self.runs, self.coalesce_s = group, 0, {}, coalesce_s
        self.pools = [ReplicaPool(LeastTokens(), Capabilities(), replicas) for _ in range(workers)]
        self.servers, self.processes, self.ended = {}, {}, False
        for index in range(replicas):
            self.start(index)

    def start(self, index):
        if self.ended:
            return
        server = self.servers[index] = ReplicaServer(Engine(self, index), coalesce_s=self.coalesce_s)
        loop, ready = asyncio.get_running_loop(), asyncio.Event()

        async def process():
            async with asyncio.TaskGroup() as requests:
                for number, pool in enumerate(self.pools):

                    def post(message, pool=pool):
                        loop.call_soon(pool.receive, index, message)

                    def send(message, number=number):
                        loop.call_soon(self.receive, server, number, message, requests)

                    server.connect(number, post)
                    pool.replica_up(index, send)
                ready.set()
                await asyncio.Event().wait()

        self.processes[index] = self.group.create_task(process())

    def receive(self, server, worker, message, requests):
        if server in self.servers.values():
            server.receive(worker, message, requests)

    def has(self, engine):
        """Return whether the process of an engine lives."""
        return any(server.engine is engine for server in self.servers.values())

    def die(self, index):
        self.deaths += 1
        self.processes[index].cancel()
        del self.servers[index]
        for pool in self.pools:
            pool.replica_down(index, "killed")
        asyncio.get_running_loop().call_later(0.001, self.start, index)

    def confirmed(self):
        """Return whether a worker has confirmed a request that runs alone."""
        return any(each.alone for pool in self.pools for link in pool._links for each in link.pending.values())

    def end(self):
        self.ended = True
        for process in self.processes.values():
            process.cancel()

    async def generate(self, number, name):
        """Return the result of a request, or the error of a poisoned one, at which the driver pardons all others."""
        self.runs.setdefault(name, [])
        try:
            return await self.pools[number % len(self.pools)].generate(make_request(name))
        except PoisonedRequestError as error:
            for pool in self.pools:
                pool.pardon()
            for server in self.servers.values():
                server.pardon()
            return error


async def run(names, *, workers=2, replicas=2, coalesce_s=0.0):
    """Run requests in the order of their names, and return the cluster and the outcomes by name."""
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        cluster = Cluster(group, workers=workers, replicas=replicas, coalesce_s=coalesce_s)
        await asyncio.sleep(0)
        async with asyncio.TaskGroup() as requests:
            tasks = {name: requests.create_task(cluster.generate(i, name)) for i, name in enumerate(names)}
        cluster.end()
    return cluster, {name: task.result() for name, task in tasks.items()}


@settings(max_examples=60)
@given(
    names=st.integers(0, 30).map(lambda count: [f"t{i}" for i in range(count)]),
    killers=st.integers(0, 3),
    workers=st.integers(1, 3),
    replicas=st.integers(1, 3),
    coalesce_s=st.sampled_from([0.0, 0.002]),
    order=st.randoms(use_true_random=False),
)
def test_killers_fail_and_all_others_finish(names, killers, workers, replicas, coalesce_s, order):
    """
    Each killer fails after its third replica died, which it had to itself, and every other request finishes.

    Results that wait for a message are lost with their replica, so none may be blamed for the death of the next one.
    """
    names = [*names, *(f"{KILLER}{i}" for i in range(killers))]
    order.shuffle(names)
    cluster, outcomes = asyncio.run(run(names, workers=workers, replicas=replicas, coalesce_s=coalesce_s))

    failed = {name for name, outcome in outcomes.items() if isinstance(outcome, PoisonedRequestError)}
    assert failed == {name for name in names if name.startswith(KILLER)}
    # Before one is found, each of the others causes two deaths at most; then its count restarts.
    assert cluster.deaths <= killers * (killers + 2)
    assert all(outcome.token_ids.tolist() == [7] for name, outcome in outcomes.items() if name not in failed)
    if killers == 1:
        assert cluster.deaths == 3


def test_the_last_request_is_tested_first():
    """Among 200 suspects of two workers a killer that came last is found at once, and the others run side by side."""
    cluster, outcomes = asyncio.run(run([*(f"t{i}" for i in range(200)), KILLER]))

    assert isinstance(outcomes[KILLER], PoisonedRequestError)
    assert "3 replicas died while they ran this request, the last ran nothing else: killed" in str(outcomes[KILLER])
    assert cluster.deaths == 3
    assert sum(runs[-1] for name, runs in cluster.runs.items() if name != KILLER) <= 4


def test_a_replica_that_dies_for_another_reason_costs_no_request():
    """Requests that wait for their turn to run alone are not blamed for the death of their replica."""

    async def body():
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            cluster = Cluster(group, workers=2, replicas=1)
            await asyncio.sleep(0)
            async with asyncio.TaskGroup() as requests:
                tasks = [requests.create_task(cluster.generate(i, f"t{i}")) for i in range(10)]
                while cluster.deaths < 2:
                    await until(lambda: 0 in cluster.servers and cluster.servers[0].engine.running)
                    cluster.die(0)
                # One suspect has its slot and its worker does not know that yet; the others wait.
                await until(lambda: 0 in cluster.servers)
                await until(lambda: cluster.servers[0]._unconfirmed and not cluster.confirmed())
                cluster.die(0)
            cluster.end()
            return cluster, [task.result() for task in tasks]

    cluster, outcomes = asyncio.run(body())
    assert [outcome.token_ids.tolist() for outcome in outcomes] == [[7]] * 10
    assert all(runs == [True] for runs in cluster.runs.values())


def test_a_dead_worker_does_not_hold_a_replica():
    """A suspect whose worker has died before its confirmation leaves its slot to the next request."""

    async def body():
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            cluster = Cluster(group, workers=2, replicas=1)
            await asyncio.sleep(0)
            server, pool = cluster.servers[0], cluster.pools[0]
            pool.max_deaths = 0  # every request of this worker is a suspect
            lost = [group.create_task(cluster.generate(0, f"t{i}")) for i in range(2)]
            await until(lambda: server._unconfirmed)
            server.disconnect(0)
            result = await cluster.generate(1, "other")
            for task in lost:
                task.cancel()
            cluster.end()
            return result

    assert asyncio.run(body()).token_ids.tolist() == [7]


class Raising:
    """An engine whose request, or abort, raises an error that is no `Exception`."""

    def __init__(self, error):
        self.error, self.asked, self.aborted = error, asyncio.Event(), asyncio.Event()

    async def generate(self, request):
        if request.trajectory_id == "raises":
            raise self.error
        self.asked.set()
        await self.aborted.wait()
        return GenerateResult(token_ids=[7], logprobs=[-0.5], finish_reason=FinishReason.ABORT)

    async def abort(self, request_id):
        self.aborted.set()
        raise self.error


@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyboardInterrupt(), SystemExit(1), RuntimeError("x")])
def test_any_error_of_an_engine_concerns_one_request(error):
    """It is answered at once, and an error of `abort` leaves the replica and its other requests alone."""

    async def body():
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            cluster = Cluster(group, workers=1, replicas=1)
            await asyncio.sleep(0)
            engine = cluster.servers[0].engine = Raising(error)
            pool = cluster.pools[0]
            other = group.create_task(pool.generate(make_request("other")))
            await engine.asked.wait()
            with pytest.raises(EngineError, match=type(error).__name__):
                await pool.generate(make_request("raises"))
            await pool.abort("r-other")
            result = await other
            cluster.end()
            return result, cluster.deaths

    result, deaths = asyncio.run(body())
    assert result.finish_reason is FinishReason.ABORT
    assert deaths == 0


class Visitors:
    """Requests in an admission that stay until they are told to leave; each checks that it may be inside."""

    def __init__(self, limit, group):
        self.admission, self.group = Admission(limit), group
        self.inside, self.entered, self.tasks, self.leaves = {}, [], [], []

    def enter(self, suspect):
        self.leaves.append(asyncio.Event())
        self.tasks.append(self.group.create_task(self._visit(len(self.tasks), suspect)))

    async def _visit(self, number, suspect):
        self.inside[number] = await self.admission.enter(alone=suspect)
        self.entered.append(number)
        assert len(self.inside) <= (1 if any(self.inside.values()) else self.admission.limit)
        try:
            await self.leaves[number].wait()
        finally:
            del self.inside[number]
            self.admission.leave()

    def handle(self, event, value):
        if event == "enter":
            self.enter(suspect=value % 2 == 1)
        elif event == "pardon":
            self.admission.pardon()
        elif event == "cancel" and self.tasks:
            self.tasks[value % len(self.tasks)].cancel()
        elif event == "leave" and self.inside:
            self.leaves[sorted(self.inside)[value % len(self.inside)]].set()


@settings(max_examples=100)
@given(
    limit=st.integers(1, 4),
    events=st.lists(
        st.tuples(st.sampled_from(["enter", "enter", "leave", "cancel", "pardon"]), st.integers(0, 20), st.booleans()),
        max_size=30,
    ),
)
def test_admission_is_exclusive_for_suspects(limit, events):
    """At most `limit` requests are inside, a suspect is alone, and each enters or was cancelled before."""

    async def body():
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            visitors = Visitors(limit, group)
            for event, value, pause in events:
                visitors.handle(event, value)
                for _ in range(3 * pause):
                    await asyncio.sleep(0)
            for leave in visitors.leaves:
                leave.set()
        return visitors

    visitors = asyncio.run(body())
    cancelled = {number for number, task in enumerate(visitors.tasks) if task.cancelled()}
    assert cancelled | set(visitors.entered) == set(range(len(visitors.tasks)))
    assert not visitors.admission.is_full


def test_admission_is_in_order():
    """A suspect waits for the requests before it, and the requests after it wait for the suspect."""

    async def body():
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            visitors, states = Visitors(9, group), []
            for suspect in (False, True, False, False):
                visitors.enter(suspect)
            for leave in visitors.leaves:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                states.append(sorted(visitors.inside))
                leave.set()
        return states

    assert asyncio.run(body()) == [[0], [1], [2, 3], [3]]
