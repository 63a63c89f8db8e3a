"""
A discrete-event simulator of replicas behind a router; it measures the effect of a router in seconds of model time.

A replica is a fluid continuous-batching server. One decode step gives each running request a token and takes
``step_s + request_s * running + token_s * context`` seconds, integrated exactly while nothing changes. Prefill runs
before decode, as in vLLM's default scheduler, and costs `prefill_token_s` for each context token that the prefix cache
does not hold. The cache has one entry for the prompt of each group and one for the tokens that each trajectory added;
it evicts the least recently used entry first. There is no wall clock and no randomness: one trace and one router give
one result.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from heapq import heappop, heappush
from itertools import count
from typing import Final

import numpy as np
from attrs import Factory, define, field, frozen

from turnwise.errors import ConfigError, EngineError
from turnwise.protocols import ReplicaLoad, Router
from turnwise.types import GenerateRequest, SamplingParams
from turnwise_routing_bench.event_queue import EventQueue
from turnwise_routing_bench.traces import (
    ReplicaEvent,
    Trace,
    TraceTrajectory,
    at_least_0,
    at_least_1,
    finite_seconds,
    more_than_0,
)

_SAMPLING: Final = SamplingParams()
_Key = tuple[str, str]


@frozen(kw_only=True)
class ReplicaModel:
    """
    Costs of a replica's work; the defaults have the magnitude of a 7B model on one H100.

    Attributes:
        step_s: seconds of an empty decode step.
        request_s: seconds that each running request adds to a step.
        token_s: seconds that each context token of the running requests adds to a step.
        prefill_token_s: seconds per token that the prefix cache does not hold.
        max_in_flight: requests that run at once; others wait in order of arrival.
        cache_tokens: size of the prefix cache in tokens.
    """

    step_s: float = field(default=0.008, validator=more_than_0)
    request_s: float = field(default=2e-5, validator=finite_seconds)
    token_s: float = field(default=3e-8, validator=finite_seconds)
    prefill_token_s: float = field(default=3e-5, validator=finite_seconds)
    max_in_flight: int = field(default=64, validator=at_least_1)
    cache_tokens: int = field(default=400_000, validator=at_least_0)


@define(eq=False)
class Running:
    """A trajectory in progress; `context` is the number of tokens at the start of the current or next turn."""

    plan: TraceTrajectory
    context: int
    turn: int = 0
    replica: int | None = None

    @property
    def num_new_tokens(self) -> int:
        return self.plan.turns[self.turn].num_new_tokens

    @property
    def keys(self) -> tuple[_Key, _Key]:
        """Cache keys of the tokens after the prompt, and of the prompt."""
        own, group = self.plan.trajectory_id, self.plan.group_id
        return ("own", own), ("group", group) if group else ("prompt", own)


@define(eq=False)
class _PrefixCache:
    """Token counts of prompts and of the tokens after them, by key, the least recently used first."""

    capacity: int
    entries: OrderedDict[_Key, int] = field(factory=OrderedDict)
    size: int = 0

    def count_hits(self, trajectory: Running) -> int:
        """Return the number of leading context tokens that the cache holds."""
        own, prompt = trajectory.keys
        held = min(self.entries.get(prompt, 0), trajectory.plan.num_prompt_tokens)
        # A prefix cache matches from the first token: without the whole prompt, later tokens cannot match.
        if held == trajectory.plan.num_prompt_tokens:
            held += self.entries.get(own, 0)
        return min(held, trajectory.context)

    def store(self, trajectory: Running, context: int) -> None:
        """Add a context, and evict the oldest entries until the cache fits."""
        own, prompt = trajectory.keys
        # The prompt comes last, so that it is evicted after the tokens that build on it.
        for key, num_tokens in (
            (own, context - trajectory.plan.num_prompt_tokens),
            (prompt, trajectory.plan.num_prompt_tokens),
        ):
            before = self.entries.pop(key, 0)
            self.entries[key] = max(before, num_tokens)
            self.size += self.entries[key] - before
        while self.size > self.capacity:
            self.size -= self.entries.popitem(last=False)[1]


@define(eq=False)
class Replica:
    """
    One replica.

    `steps` counts decode steps, so a request for n tokens ends n steps after its start. `prefill_s` is the prefill work
    that delays decoding. `context` is the number of tokens that a decode step reads. `num_tokens` is what the router
    sees: the context tokens of all requests here at the time when they were sent.
    """

    model: ReplicaModel
    cache: _PrefixCache = Factory(lambda self: _PrefixCache(self.model.cache_tokens), takes_self=True)
    now: float = 0.0
    speed: float = 1.0
    available: bool = True
    steps: float = 0.0
    prefill_s: float = 0.0
    context: float = 0.0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    running: list[tuple[float, int, Running]] = field(factory=list)
    queue: deque[Running] = field(factory=deque)
    _order: count[int] = field(factory=count)

    def load(self) -> ReplicaLoad:
        num_requests = len(self.running) + len(self.queue)
        return ReplicaLoad(num_requests=num_requests, num_tokens=self.num_tokens, available=self.available)

    def add(self, trajectory: Running) -> None:
        self.num_tokens += trajectory.context
        self.queue.append(trajectory)
        self._admit()

    def next_finish(self) -> float:
        """Return the time at which the next request ends if nothing else happens."""
        if not self.running:
            return math.inf
        steps = max(0.0, self.running[0][0] - self.steps)
        first_s, growth_s = self._step_s()
        return self.now + (self.prefill_s + steps * (first_s + growth_s * steps / 2)) / self.speed

    def advance(self, now: float) -> None:
        """Work until `now`, which must not be later than `next_finish`."""
        work_s, self.now = (now - self.now) * self.speed, now
        self.prefill_s, work_s = max(0.0, self.prefill_s - work_s), work_s - self.prefill_s
        if self.running and work_s > 0:
            first_s, growth_s = self._step_s()
            # The root n of first * n + growth * n^2 / 2 = work, in the form that is exact for a growth near 0.
            steps = 2 * work_s / (first_s + math.sqrt(first_s**2 + 2 * growth_s * work_s))
            self.steps += steps
            self.context += steps * len(self.running)

    def finish(self) -> Running:
        """End and return the next request; `now` must be the time of `next_finish`."""
        # The exact step of the end replaces the sum of steps so far, so that rounding errors do not accumulate.
        self.steps, _, trajectory = heappop(self.running)
        end = trajectory.context + trajectory.num_new_tokens
        self.context = self.context - end if self.running else 0.0
        self.num_tokens -= trajectory.context
        self.cache.store(trajectory, end)
        self._admit()
        return trajectory

    def fail(self) -> tuple[list[Running], int]:
        """Drop all state; return the requests in order of arrival, and the number of tokens that they had sampled."""
        running = sorted(self.running, key=lambda each: each[1])
        lost = sum(int(trajectory.num_new_tokens - (end - self.steps)) for end, _, trajectory in running)
        orphans = [trajectory for _, _, trajectory in running] + list(self.queue)
        self.running, self.queue, self.cache = [], deque(), _PrefixCache(self.model.cache_tokens)
        self.prefill_s, self.context, self.num_tokens = 0.0, 0.0, 0
        return orphans, lost

    def _step_s(self) -> tuple[float, float]:
        """Return the seconds of the next decode step, and the seconds by which each step is longer than the last."""
        model, num_running = self.model, len(self.running)
        first_s = model.step_s + model.request_s * num_running + model.token_s * self.context
        return first_s, model.token_s * num_running

    def _admit(self) -> None:
        while self.queue and len(self.running) < self.model.max_in_flight:
            trajectory = self.queue.popleft()
            held = self.cache.count_hits(trajectory)
            self.num_cached_tokens += held
            self.prefill_s += (trajectory.context - held) * self.model.prefill_token_s
            self.context += trajectory.context
            self.cache.store(trajectory, trajectory.context)
            heappush(self.running, (self.steps + trajectory.num_new_tokens, next(self._order), trajectory))


@frozen(kw_only=True)
class RoutingResult:
    """
    Measurements of one router on one trace.

    Attributes:
        makespan_s: time at which the last trajectory ended.
        prefix_hit_rate: context tokens that a cache held, relative to all context tokens that were sent.
        balance: largest over mean outstanding tokens of the available replicas, each integrated over time; 1 is even.
        num_migrations: requests that went to another replica than the previous request of their trajectory.
        num_requests: requests sent, including requests that a failing replica lost.
        num_new_tokens: tokens sampled and kept.
        num_lost_tokens: tokens sampled by replicas that failed before the turn ended.
    """

    makespan_s: float
    prefix_hit_rate: float
    balance: float
    num_migrations: int
    num_requests: int
    num_new_tokens: int
    num_lost_tokens: int


def simulate(trace: Trace, router: Router, num_replicas: int, model: ReplicaModel | None = None) -> RoutingResult:
    """
    Replay a trace through a router.

    Raises:
        ConfigError: `num_replicas` is less than 1.
        EngineError: no replica was available, or the router chose an unavailable one.
    """
    if num_replicas < 1:
        raise ConfigError(f"replicas: expected at least 1, got {num_replicas}")
    return _Simulation(router, [Replica(model or ReplicaModel()) for _ in range(num_replicas)]).run(trace)


@define(eq=False)
class _Simulation:
    """One simulation: the replicas, and the events of trajectories between their requests."""

    router: Router
    replicas: list[Replica]
    now: float = 0.0
    largest: float = 0.0
    mean: float = 0.0
    totals: Counter[str] = field(factory=Counter)
    _queue: EventQueue[Running | ReplicaEvent] = field(factory=EventQueue)

    def run(self, trace: Trace) -> RoutingResult:
        for event in trace.events:
            if event.replica < len(self.replicas):
                self._queue.schedule(event.at_s, event)
        for plan in trace.trajectories:
            self._queue.schedule(plan.arrival_s, Running(plan, plan.num_prompt_tokens))
        num_left = len(trace.trajectories)
        while num_left:
            num_left -= self._step()
        return RoutingResult(
            makespan_s=self.now,
            prefix_hit_rate=sum(replica.num_cached_tokens for replica in self.replicas) / self.totals["sent_tokens"],
            balance=self.largest / self.mean,
            num_migrations=self.totals["migrations"],
            num_requests=self.totals["requests"],
            num_new_tokens=self.totals["new_tokens"],
            num_lost_tokens=self.totals["lost_tokens"],
        )

    def _step(self) -> bool:
        """Advance to the next event, and return whether it ended a trajectory."""
        finishes = [replica.next_finish() for replica in self.replicas]
        soonest = min(finishes)
        if soonest < math.inf and soonest <= self._queue.next_at:
            self._advance(soonest)
            self._end_turn(self.replicas[finishes.index(soonest)].finish())
            return False
        event = self._queue.pop()
        self._advance(self._queue.now)
        if isinstance(event, ReplicaEvent):
            self._change(event)
        elif event.turn < len(event.plan.turns):
            self._send(event)
        else:
            self.router.release(event.plan.trajectory_id)
            return True
        return False

    def _advance(self, now: float) -> None:
        tokens = [replica.num_tokens for replica in self.replicas if replica.available] or [0]
        self.largest += (now - self.now) * max(tokens)
        self.mean += (now - self.now) * sum(tokens) / len(tokens)
        self.now = now
        for replica in self.replicas:
            replica.advance(now)

    def _send(self, trajectory: Running) -> None:
        request = GenerateRequest(
            request_id=f"{trajectory.plan.trajectory_id}-{self.totals['requests']}",
            trajectory_id=trajectory.plan.trajectory_id,
            token_ids=np.broadcast_to(np.int32(0), (trajectory.context,)),
            sampling=_SAMPLING,
            group_id=trajectory.plan.group_id,
        )
        index = self.router.choose(request, [replica.load() for replica in self.replicas])
        if not (0 <= index < len(self.replicas) and self.replicas[index].available):
            raise EngineError(f"the router chose replica {index}, which is not available")
        migrated = trajectory.replica is not None and trajectory.replica != index
        self.totals.update(migrations=int(migrated), requests=1, sent_tokens=trajectory.context)
        trajectory.replica = index
        self.replicas[index].add(trajectory)

    def _end_turn(self, trajectory: Running) -> None:
        turn = trajectory.plan.turns[trajectory.turn]
        self.totals["new_tokens"] += turn.num_new_tokens
        trajectory.context += turn.num_new_tokens + turn.num_observation_tokens
        trajectory.turn += 1
        self._queue.schedule(self.now + turn.tool_s, trajectory)

    def _change(self, event: ReplicaEvent) -> None:
        replica = self.replicas[event.replica]
        replica.speed, replica.available = event.speed, event.available
        if not event.available:
            orphans, num_lost_tokens = replica.fail()
            self.totals["lost_tokens"] += num_lost_tokens
            for trajectory in orphans:
                self._send(trajectory)
