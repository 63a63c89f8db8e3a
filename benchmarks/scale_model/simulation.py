"""
A discrete-event model of a run on Ray: the driver, the workers, the replicas, and the messages between them.

Each process is a station with one event loop, whose jobs take the measured CPU seconds (`Costs`). The model follows the
runtime: the driver shares episodes out and refills windows; workers start sixteen episodes at a time, coalesce requests
by replica, and keep results until the driver collects them; replicas coalesce results by worker. Engines are the fluid
servers of `turnwise_routing_bench.simulator`, or have a fixed speed.

A large run is folded: one of `fold` equal shares is simulated, and the driver does each job `fold` times. A worker's
messages go to `fold` times as many replicas as the share has, so they coalesce as rarely.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice

from attrs import define, field

from scale_model.costs import Costs
from scale_model.parts import Cores, Engine, Outbox, Queue, Station, Work, keep_busy, keep_pinging
from scale_model.run import Death, Episode, Link, ReplicaProcess, Run, Worker
from turnwise_routing_bench.simulator import Running
from turnwise_routing_bench.traces import TraceTrajectory

_BATCH = 16
_COLLECT = 256
_NOTHING: Work = (0.0, lambda: None)


@define(eq=False)
class Simulation:
    """
    One run.

    Attributes:
        ended: number of deliveries of each episode.
        totals: counts of messages, turns, tokens and repairs of the simulated share.
        sojourn_s: seconds from start to delivery of all delivered episodes.
        area: started and undelivered episodes, integrated over time.
        backlog_bytes: results that the driver has received and not handled, and their maximum.
    """

    run: Run
    costs: Costs
    queue: Queue = field(factory=Queue)
    driver: Station = field(init=False)
    workers: list[Worker] = field(init=False)
    replicas: list[ReplicaProcess] = field(init=False)
    ended: Counter[int] = field(factory=Counter)
    totals: Counter[str] = field(factory=Counter)
    sojourn_s: float = 0.0
    area: float = 0.0
    backlog_bytes: float = 0.0
    max_backlog_bytes: float = 0.0
    num_started: int = 0
    _changed_at: float = 0.0
    _repeated: deque[int] = field(factory=deque)
    _numbers: Iterator[int] = field(init=False)
    _left: int | None = field(init=False)
    _plans: dict[int, TraceTrajectory] = field(factory=dict)
    _rng: random.Random = field(init=False)
    _cores: Cores | None = field(init=False)

    def __attrs_post_init__(self) -> None:
        run, self._rng = self.run, random.Random(self.run.seed)
        self._cores = Cores(run.cores) if run.cores else None
        self._left = None if run.num_episodes is None else run.num_episodes // run.fold
        self._numbers = iter(range(self._left if self._left is not None else 1 << 62))
        self.driver = Station(self.queue, self._cores, self.costs.driver_wake_s)
        self.replicas = [
            ReplicaProcess(index, Station(self.queue, self._cores, self.costs.replica_wake_s))
            for index in range(run.num_replicas // run.fold)
        ]
        for replica in self.replicas:
            replica.engine = Engine(self.queue, run.engine, self._answer)
        self.workers = [self._worker(index) for index in range(run.num_workers // run.fold)]

    def simulate(self) -> None:
        """Run until all episodes have ended, or until the end of the time."""
        for death in self.run.deaths:
            self.queue.schedule(death.at_s, partial(self._die, death))
        if self.run.heartbeat_s:
            num_actors = self.run.num_workers + self.run.num_replicas
            keep_pinging(self.driver, num_actors, self.run.ping_s, self.costs.call_s)
        if self._cores and self.run.others:
            keep_busy(self.queue, self._cores, self.run.others)
        for worker in self.workers:
            self._collect_next(worker, 0)
        share = self.run.window if self._left is None else -(-self._left // len(self.workers))
        for worker in self.workers:
            self._submit(worker, min(share, self.run.window), self.run.stagger)
        while self._left != 0 and self.queue.next_at <= self.run.until_s:
            self.queue.pop()()
        if self._left != 0:
            self.queue.now = self.run.until_s
        self.count_in_flight(0)

    def count_in_flight(self, change: int) -> None:
        """Integrate the episodes in flight until now, and change their number."""
        self.area += self.num_started * (self.queue.now - self._changed_at)
        self._changed_at = self.queue.now
        self.num_started += change

    def _worker(self, index: int) -> Worker:
        own = [math.inf if replica.dead else 0.0 for replica in self.replicas]
        station = Station(self.queue, self._cores, self.costs.worker_wake_s)
        return Worker(index, station, own, [0.0] * len(own), self.run.max_in_flight)

    def _take(self, limit: int) -> list[int]:
        taken = [self._repeated.popleft() for _ in range(min(limit, len(self._repeated)))]
        return [*taken, *islice(self._numbers, max(0, limit - len(taken)))]

    def _submit(self, worker: Worker, limit: int, stagger: bool = False) -> None:
        """Send a worker its next episodes."""
        if not (numbers := self._take(limit)):
            return
        episodes = []
        for number in numbers:
            plan = self._plans.get(number) or self.run.make_episode(self._rng, number)
            self._plans[number] = plan
            episode = Episode(plan, plan.num_prompt_tokens, number=number, worker=worker)
            if stagger:
                episode.turn = self._rng.randrange(len(plan.turns))
                episode.context += sum(t.num_new_tokens + t.num_observation_tokens for t in plan.turns[: episode.turn])
            episodes.append(episode)
        worker.held.update((episode.number, episode) for episode in episodes)
        self.totals["submits"] += 1
        num_bytes = 600.0 + sum(4.0 * episode.plan.num_prompt_tokens for episode in episodes)
        cost_s = self.run.fold * (self.costs.post_s + self.costs.sent_bytes_s(num_bytes))
        self.driver.add_work(cost_s, partial(self._send_episodes, worker, episodes, num_bytes), self.run.fold)

    def _send_episodes(self, worker: Worker, episodes: list[Episode], num_bytes: float) -> None:
        def receive() -> None:
            if not worker.dead:
                worker.waiting.extend(episodes)
                self._start_some(worker)

        cost_s = self.costs.reply_s + self.costs.received_bytes_s(num_bytes)
        self._travel(num_bytes, lambda: worker.station.add_work(cost_s, receive))

    def _collect(self, worker: Worker, due: bool = False) -> None:
        """Let a worker reply to the driver's call with all episodes that have ended by then."""
        worker.reply_due &= not due
        if not (worker.collecting and worker.finished):
            return
        if (due_s := worker.replied_at + self.run.collect_s) > self.queue.now and not worker.must_reply(_COLLECT):
            if not worker.reply_due:
                worker.reply_due = True
                self.queue.schedule(due_s, partial(self._collect, worker, due=True))
            return
        worker.collecting, worker.replied_at = False, self.queue.now

        def reply() -> Work:
            episodes, worker.finished = worker.finished[:_COLLECT], worker.finished[_COLLECT:]
            num_tokens = sum(episode.context for episode in episodes)
            num_bytes = 1000.0 * len(episodes) + 12.0 * num_tokens
            then = partial(self._travel, num_bytes, partial(self._handle, worker, episodes, num_tokens, num_bytes))
            return self.costs.reply_s + self.costs.sent_bytes_s(num_bytes), then

        worker.station.add(reply)

    def _handle(self, worker: Worker, episodes: list[Episode], num_tokens: int, num_bytes: float) -> None:
        """Let the driver handle a reply: deliver its episodes, refill the window and call again."""
        self.totals["collects"] += 1
        self.totals["driver_bytes"] += int(num_bytes)
        self.backlog_bytes += num_bytes
        self.max_backlog_bytes = max(self.max_backlog_bytes, self.backlog_bytes)
        costs = self.costs
        cost_s = costs.call_s + costs.received_bytes_s(num_bytes) + len(episodes) * costs.driver_episode_s
        cost_s += num_tokens * costs.driver_token_s

        def deliver() -> None:
            self.backlog_bytes -= num_bytes
            if worker.dead:
                return
            for episode in episodes:
                del worker.held[episode.number]
                self._deliver(episode)
            self._submit(worker, len(episodes))
            self._travel(0.0, partial(self._collect_next, worker, len(episodes)))

        self.driver.add_work(self.run.fold * cost_s, deliver, self.run.fold)

    def _deliver(self, episode: Episode) -> None:
        self.ended[episode.number] += 1
        self._plans.pop(episode.number)
        assert episode.started_at is not None
        self.sojourn_s += self.queue.now - episode.started_at
        self.count_in_flight(-1)
        self.totals["episodes"] += 1
        self.totals["tokens"] += episode.context
        if self._left is not None:
            self._left -= 1

    def _collect_next(self, worker: Worker, num_collected: int) -> None:
        worker.free += num_collected
        worker.collecting = True
        self._start_some(worker)
        self._collect(worker)

    # A worker

    def _start_some(self, worker: Worker) -> None:
        """Start sixteen episodes, then let other jobs of the worker run before the next ones."""
        count = min(_BATCH, worker.free, len(worker.waiting))
        if worker.starting or worker.dead or not count:
            return
        worker.starting, worker.free = True, worker.free - count
        episodes = [worker.waiting.popleft() for _ in range(count)]
        for episode in episodes:
            episode.started_at = self.queue.now
        self.count_in_flight(count)
        worker.num_running += count
        costs, num_replicas = self.costs, self.run.num_replicas
        cost_s = count * (costs.worker_episode_s + num_replicas * (costs.view_s + costs.release_s))
        cost_s += costs.worker_prompt_token_s * sum(episode.plan.num_prompt_tokens for episode in episodes)

        def started() -> None:
            worker.starting = False
            for episode in episodes:
                self._request(episode)
            self._start_some(worker)

        worker.station.add_work(cost_s, started)

    def _request(self, episode: Episode) -> None:
        """Put the next request of an episode into the message to its replica."""
        worker, link = episode.worker, episode.link
        assert worker is not None
        if worker.dead:
            return
        if link is None or worker.links.get(link.key) is not link:
            link = episode.link = self._choose(worker)
            if link is None:  # no replica is live; the driver tells when one is
                self.queue.schedule(self.queue.now + 1.0, partial(self._request, episode))
                return
            episode.known = 0
        worker.own[link.replica.index] += episode.context
        link.pending[episode.number] = episode
        link.requests.append(episode)
        link.to_replica.schedule()

    def _choose(self, worker: Worker) -> Link | None:
        """Return the link to the replica with the least tokens in the worker's view; None if none is live."""
        if (index := worker.least_loaded(self._rng)) is None:
            return None
        key = index, self._rng.randrange(self.run.fold)
        if key not in worker.links:
            link = worker.links[key] = Link(worker, self.replicas[index], key)
            link.to_replica = Outbox(worker.station, self.run.coalesce_s, partial(self._send_requests, link))
            link.to_worker = Outbox(link.replica.station, self.run.coalesce_s, partial(self._send_results, link))
        return worker.links[key]

    def _send_requests(self, link: Link) -> Work:
        episodes, link.requests = link.requests, []
        if not (episodes or link.num_released) or link.worker.dead:
            return _NOTHING
        link.num_released = 0
        num_bytes = 500.0 + 4.0 * sum(episode.context - episode.known for episode in episodes)
        self.totals["to_replica"] += 1
        self.totals["network_bytes"] += int(num_bytes)
        costs = self.costs
        received_s = costs.request_receive_s + num_bytes * costs.channel_receive_byte_s
        received_s += len(episodes) * costs.replica_request_s
        receive = partial(self._admit, link, episodes)
        arrive = partial(link.replica.station.add_work, received_s, receive)
        return costs.request_send_s + num_bytes * costs.channel_send_byte_s, partial(self._travel, num_bytes, arrive)

    def _receive_results(self, link: Link, episodes: Sequence[Episode], num_tokens: int) -> None:
        worker = link.worker
        worker.reported[link.replica.index] = num_tokens
        for episode in episodes:
            if not worker.dead and link.pending.pop(episode.number, None) is episode:
                worker.own[link.replica.index] -= episode.context
                worker.station.add_work(self._turn_s(episode), partial(self._end_turn, episode))

    def _turn_s(self, episode: Episode) -> float:
        costs, num_tokens = self.costs, episode.num_new_tokens
        last = episode.turn + 1 == len(episode.plan.turns)
        views_s = 0.0 if last else self.run.num_replicas * costs.view_s
        return costs.worker_turn_s + num_tokens * costs.worker_token_s + views_s

    def _end_turn(self, episode: Episode) -> None:
        worker, turn = episode.worker, episode.plan.turns[episode.turn]
        assert worker is not None
        if worker.dead:
            return
        self.totals["turns"] += 1
        self.totals["new_tokens"] += turn.num_new_tokens
        episode.known = episode.context + turn.num_new_tokens
        episode.context = episode.known + turn.num_observation_tokens
        episode.turn += 1
        if episode.turn == len(episode.plan.turns):
            if (link := episode.link) is not None:
                link.num_released += 1
                link.to_replica.schedule()
            worker.finished.append(episode)
            worker.num_running -= 1
            self._collect(worker)
        elif turn.tool_s:
            self.queue.schedule(self.queue.now + turn.tool_s, partial(self._request, episode))
        else:
            self._request(episode)

    # A replica

    def _admit(self, link: Link, episodes: Sequence[Episode]) -> None:
        if not link.replica.dead:
            for episode in episodes:
                link.replica.engine.admit(episode)

    def _answer(self, request: Running) -> None:
        assert isinstance(request, Episode)
        link = request.link
        assert link is not None
        link.results.append(request)
        send = link.to_worker.schedule if link.replica.engine.num_requests else link.to_worker.flush
        send()

    def _send_results(self, link: Link) -> Work:
        episodes, link.results = link.results, []
        if not episodes or link.replica.dead:
            return _NOTHING
        num_bytes = 300.0 + 8.0 * sum(episode.num_new_tokens for episode in episodes)
        self.totals["to_worker"] += 1
        self.totals["network_bytes"] += int(num_bytes)
        costs = self.costs
        receive_s = costs.result_receive_s + num_bytes * costs.channel_receive_byte_s
        receive = partial(self._receive_results, link, episodes, link.replica.engine.num_tokens)
        arrive = partial(link.worker.station.add_work, receive_s, receive)
        return costs.result_send_s + num_bytes * costs.channel_send_byte_s, partial(self._travel, num_bytes, arrive)

    def _travel(self, num_bytes: float, arrive: Callable[[], None]) -> None:
        delay_s = self.run.latency_s + num_bytes * self.run.network_byte_s
        self.queue.schedule(self.queue.now + delay_s, arrive)

    # Deaths

    def _die(self, death: Death) -> None:
        """End a process, and let the driver tell the others when it knows, and restart it later."""
        run, costs = self.run, self.costs
        detected_at = self.queue.now + death.detect_s
        if death.kind == "replica":
            replica = self.replicas[death.index]
            replica.dead = True
            replica.engine.fail()
            cost_s, down = run.num_workers * costs.post_s, partial(self._replica_down, replica)
            up_s, up = run.num_workers * costs.post_s, partial(self._replica_up, replica)
        else:
            worker = self.workers[death.index]
            worker.dead = True
            cost_s, down = 0.0, partial(self._worker_down, worker)
            up_s, up = costs.post_s, partial(self._worker_up, worker)
        self.queue.schedule(detected_at, partial(self.driver.add_work, cost_s, down))
        self.queue.schedule(detected_at + death.restart_s, partial(self.driver.add_work, up_s, up))

    def _replica_down(self, replica: ReplicaProcess) -> None:
        for worker in self.workers:
            worker.own[replica.index] = math.inf
            for key in [key for key in worker.links if key[0] == replica.index]:
                link = worker.links.pop(key)
                link.requests.clear()
                self.totals["moved"] += len(link.pending)
                worker.station.add_work(self.costs.reply_s, partial(self._retry, tuple(link.pending.values())))

    def _retry(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            self._request(episode)

    def _replica_up(self, dead: ReplicaProcess) -> None:
        replica = self.replicas[dead.index] = ReplicaProcess(dead.index, dead.station)
        replica.engine = Engine(self.queue, self.run.engine, self._answer)
        replica.engine.replica.now = self.queue.now
        replica.engine.area = dead.engine.area
        for worker in self.workers:
            worker.own[replica.index] = worker.reported[replica.index] = 0.0

    def _worker_down(self, worker: Worker) -> None:
        """Give the episodes of a dead worker to the others."""
        self.count_in_flight(-sum(episode.started_at is not None for episode in worker.held.values()))
        self.totals["retried"] += len(worker.held)
        self._repeated.extend(sorted(worker.held))
        worker.held.clear()
        worker.waiting.clear()
        worker.links.clear()
        live = [each for each in self.workers if not each.dead]
        for each in live:
            share = -(-len(self._repeated) // len(live))
            self._submit(each, min(share, self.run.window - len(each.held)))

    def _worker_up(self, dead: Worker) -> None:
        worker = self.workers[dead.index] = self._worker(dead.index)
        self._collect_next(worker, 0)
        self._submit(worker, self.run.window)
