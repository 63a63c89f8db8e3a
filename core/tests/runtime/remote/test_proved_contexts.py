"""An engine continues exactly the ids that a worker asked for, despite lost channels and changed records."""

import asyncio
import pickle
from itertools import count

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from turnwise.runtime.remote.replica_pool import ReplicaPool
from turnwise.runtime.remote.replica_server import ReplicaServer
from turnwise.types import Capabilities, FinishReason, GenerateRequest, GenerateResult, SamplingParams

SAMPLING = SamplingParams(max_tokens=9)
NAMES = ("e", "e/1", "e/1.4.0", "f")
TOKENS = st.lists(st.integers(0, 3), max_size=5)
CHANGES = st.tuples(st.sampled_from((0, 0, 0, 1, 2, 5)), st.sampled_from((0, 0, 0, 1)))
"""Tokens that a record leaves out at its end, and bits that differ in the last one that is left."""


class HeldEngine:
    """Answers when the test says so; compares each context with the worker's request at the start and at the end."""

    capabilities = Capabilities()

    def __init__(self, asked):
        self.asked, self.running, self.wrong = asked, [], []

    async def generate(self, request):
        answer = asyncio.get_running_loop().create_future()
        entry = (request.request_id, answer)
        self.running.append(entry)
        try:
            self.compare(request)
            ids = await answer
            self.compare(request)
        finally:
            self.running.remove(entry)
        return GenerateResult(token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason=FinishReason.STOP)

    def compare(self, request):
        wanted, got = self.asked[request.request_id], request.token_ids.tolist()
        if wanted != got:
            self.wrong.append((request.request_id, wanted, got))

    async def abort(self, request_id):
        for running, answer in self.running:
            if running == request_id and not answer.done():
                answer.set_result([])


class Router:
    """Chooses as the test says, so that requests of a record go back and forth."""

    def __init__(self):
        self.next = 0

    def choose(self, _request, loads):
        indices = [index for index, load in enumerate(loads) if load.available]
        return indices[self.next % len(indices)]

    def release(self, key):
        """Do nothing."""


class Channel:
    """Two queues of pickled messages. Each end may learn of its loss at another time, or never."""

    def __init__(self, number):
        self.number, self.to_replica, self.to_worker = number, [], []
        self.worker_open = self.replica_open = True

    def send(self, message):
        if self.worker_open:
            self.to_replica.append(pickle.dumps(message))

    def reply(self, message):
        if self.worker_open:
            self.to_worker.append(pickle.dumps(message))


class Wire(RuleBasedStateMachine):
    """One worker with several records, two replicas, and a network that loses channels at either end."""

    def __init__(self):
        super().__init__()
        self.loop, self.errors = asyncio.new_event_loop(), []
        self.loop.set_exception_handler(lambda _loop, context: self.errors.append(context))
        self.numbers, self.asked, self.records = count(), {}, {}
        self.router, self.tasks = Router(), {}
        self.engines = [HeldEngine(self.asked) for _ in range(2)]
        self.servers = [ReplicaServer(engine) for engine in self.engines]
        self.channels = [[], []]
        self.pool = ReplicaPool(self.router, Capabilities(), 2)
        self.settle()
        for index in range(2):
            self.connect(index)

    def teardown(self):
        """Let everything end: each request that was not cancelled has a result."""
        try:
            for index in range(2):
                self.replace_channel(index, noticed=True, flown=False)
            self.notice_lost_channels()
            for _ in range(200):
                if not self.tasks:
                    break
                self.move_everything()
            assert [] == sorted(self.tasks)
            self.engines_continue_the_requested_ids()
            assert [({}, 0)] * 2 == [(server._running, server.load.num_tokens) for server in self.servers]
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.settle()
            self.loop.close()

    def move_everything(self):
        self.move_all()
        self.end_all([1, 2])

    def end_all(self, ids):
        for index in range(2):
            for _name, answer in self.engines[index].running:
                if not answer.done():
                    answer.set_result(ids)
        self.settle()

    def settle(self):
        async def passes():
            for _ in range(12):
                await asyncio.sleep(0)

        self.loop.run_until_complete(passes())

    def create_task(self, coroutine):
        """Run a task of a server, as its task group does."""
        return self.loop.create_task(coroutine)

    def connect(self, index):
        async def up():
            channel = Channel(next(self.numbers))
            self.channels[index].append(channel)
            self.servers[index].connect(channel.number, channel.reply)
            self.pool.replica_up(index, channel.send)

        self.loop.run_until_complete(up())
        self.settle()

    def forget_channel(self, index, channel):
        async def gone():
            self.servers[index].disconnect(channel.number)
            channel.replica_open = False

        self.channels[index].remove(channel)
        self.loop.run_until_complete(gone())
        self.settle()

    def deliver(self, index, channel, queue):
        message = pickle.loads(queue.pop(0))

        async def handle():
            if queue is channel.to_worker:
                if channel.worker_open:
                    self.pool.receive(index, message)
            elif channel.replica_open:
                self.servers[index].receive(channel.number, message, self)

        self.loop.run_until_complete(handle())
        self.settle()

    @rule(name=st.sampled_from(NAMES), change=CHANGES, new=TOKENS, replica=st.integers(0, 1), own=st.booleans())
    def ask(self, name, change, new, replica, own):
        """Continue a record that took all of its last turn, some of it, or none, or whose earlier end has changed."""
        cut, changed = change
        ids = self.records.get(name, [7])
        ids = ids[: max(1, len(ids) - cut)]
        self.start(name, [*ids[:-1], ids[-1] ^ changed, *new], replica, own=own)

    @rule(name=st.sampled_from(NAMES), change=CHANGES, new=TOKENS, replica=st.integers(0, 1), ids=TOKENS)
    def take_turn(self, name, change, new, replica, ids):
        """Run a whole turn of a record, and end all other requests."""
        self.ask(name, change, new, replica, own=True)
        self.move_all()
        self.end_all(ids)
        self.move_all()

    def start(self, name, ids, replica, *, own):
        request_id = f"r{next(self.numbers)}"
        array = np.array([*ids, 99], np.int32)[:-1]
        if own:
            array.flags.writeable = False
        self.router.next = replica
        self.asked[request_id], self.records[name] = ids, ids
        request = GenerateRequest(request_id=request_id, trajectory_id=name, token_ids=array, sampling=SAMPLING)

        async def generate():
            try:
                result = await self.pool.generate(request)
                if self.records.get(name) == ids:
                    self.records[name] = [*ids, *result.token_ids.tolist()]
            finally:
                del self.tasks[request_id]

        self.tasks[request_id] = self.loop.create_task(generate())
        self.settle()

    @rule(data=st.data(), replica=st.integers(0, 1))
    def move(self, data, replica):
        """Deliver the next message of some channel, which may be an old one that only the replica still has."""
        pairs = [(c, q) for c in self.channels[replica] for q in (c.to_replica, c.to_worker) if q]
        if pairs:
            self.deliver(replica, *pairs[data.draw(st.integers(0, len(pairs) - 1))])

    @rule()
    def move_all(self):
        """Deliver every message."""
        for index in range(2):
            for channel in tuple(self.channels[index]):
                for queue in (channel.to_replica, channel.to_worker):
                    while queue:
                        self.deliver(index, channel, queue)

    @rule(data=st.data(), replica=st.integers(0, 1), ids=TOKENS)
    def answer(self, data, replica, ids):
        """End a request in an engine, which may be one that runs elsewhere now."""
        waiting = [answer for _name, answer in self.engines[replica].running if not answer.done()]
        if waiting:
            waiting[data.draw(st.integers(0, len(waiting) - 1))].set_result(ids)
            self.settle()

    @rule(replica=st.integers(0, 1), noticed=st.booleans(), flown=st.booleans())
    def lose_channel(self, replica, noticed, flown):
        """Lose a channel at the worker's end, which opens another; the replica may not notice, and may get the rest."""
        self.replace_channel(replica, noticed=noticed, flown=flown)

    def replace_channel(self, replica, *, noticed, flown):
        channel = self.channels[replica][-1]

        async def down():
            channel.worker_open = False
            channel.to_worker.clear()
            if not flown:
                channel.to_replica.clear()
            self.pool.replica_down(replica, "its channel was closed", left=True)

        self.loop.run_until_complete(down())
        if noticed:
            self.forget_channel(replica, channel)
        self.connect(replica)

    @precondition(lambda self: any(len(channels) > 1 for channels in self.channels))
    @rule()
    def notice_lost_channels(self):
        """Let the replicas notice the loss of old channels."""
        for index in range(2):
            for channel in tuple(self.channels[index][:-1]):
                self.forget_channel(index, channel)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def cancel(self, data):
        """Cancel a request."""
        self.tasks[data.draw(st.sampled_from(sorted(self.tasks)))].cancel()
        self.settle()

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def abort(self, data):
        """Abort a request."""
        self.loop.run_until_complete(self.pool.abort(data.draw(st.sampled_from(sorted(self.tasks)))))
        self.settle()

    @rule(episode=st.sampled_from(("e", "f")))
    def release(self, episode):
        """End an episode; a resumed one continues its records, or earlier forms of them."""

        async def release():
            self.pool.release(episode)

        self.loop.run_until_complete(release())
        self.settle()

    @invariant()
    def engines_continue_the_requested_ids(self):
        """No engine saw other ids than its worker asked for, and no callback failed."""
        assert [[], []] == [engine.wrong for engine in self.engines]
        assert [] == self.errors


Wire.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestWire = Wire.TestCase
