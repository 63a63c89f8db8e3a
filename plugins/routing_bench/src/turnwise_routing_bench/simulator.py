"""
A discrete-event simulator of replicas behind a router: what a routing rule does to a batch, in seconds of model time.

A replica is a fluid continuous-batching server. One decode step gives every running request a token and takes
``step_s + request_s * running + token_s * context`` seconds, integrated exactly while nothing changes. Prefill goes
before decode, as in vLLM's default scheduler, and costs `prefill_token_s` for each context token that the prefix cache
does not hold. The cache keeps one entry for the prompt of a group and one for what each trajectory added, and forgets
the least recently used first. There is no wall clock and no randomness: a trace and a router give one result.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from heapq import heappop, heappush
from itertools import count
from typing import Any, Final

import numpy as np
from attrs import Attribute, Factory, define, field, frozen, validators

from turnwise.errors import ConfigError, EngineError
from turnwise.protocols import ReplicaLoad, Router
from turnwise.types import GenerateRequest, SamplingParams

_at_least_0: Final = validators.ge(0)
_at_least_1: Final = validators.ge(1)
_seconds: Final[Any] = [validators.ge(0), validators.lt(math.inf)]
_more_than_0: Final[Any] = [validators.gt(0), validators.lt(math.inf)]
_SAMPLING: Final = SamplingParams()
_Key = tuple[str, str]


@frozen(kw_only=True)
class TraceTurn:
    """
    One turn: what the model samples, and the tool call behind it.

    Attributes:
        num_new_tokens: sampled.
        tool_s: seconds until the next turn may begin, or until the trajectory has ended.
        num_observation_tokens: what the tool's answer adds to the context.
    """

    num_new_tokens: int = field(validator=_at_least_1)
    tool_s: float = field(default=0.0, validator=_seconds)
    num_observation_tokens: int = field(default=0, validator=_at_least_0)


@frozen(kw_only=True)
class TraceTrajectory:
    """
    One trajectory.

    Attributes:
        trajectory_id: unique in the trace.
        num_prompt_tokens: length of the prompt; all trajectories of a group share their prompt.
        turns: at least one.
        arrival_s: when it begins.
        group_id: whose prompt it has; empty for one of its own.
    """

    trajectory_id: str = field(validator=validators.min_len(1))
    num_prompt_tokens: int = field(validator=_at_least_1)
    turns: tuple[TraceTurn, ...] = field(validator=validators.min_len(1))
    arrival_s: float = field(default=0.0, validator=_seconds)
    group_id: str = ""


@frozen(kw_only=True)
class ReplicaEvent:
    """
    A change of one replica.

    Attributes:
        at_s: when.
        replica: index from 0; an event of a replica that a simulation does not have is left out.
        speed: factor on all it does from then on; 0.5 takes twice the time.
        available: false: it dies, with its cache, and what it ran begins the turn again elsewhere.
    """

    at_s: float = field(validator=_seconds)
    replica: int = field(validator=_at_least_0)
    speed: float = field(default=1.0, validator=_more_than_0)
    available: bool = True


@frozen(kw_only=True)
class Trace:
    """
    What is replayed.

    Attributes:
        name: for tables.
        trajectories: at least one, with different ids.
        events: what happens to replicas, in any order.
    """

    name: str
    trajectories: tuple[TraceTrajectory, ...] = field(validator=validators.min_len(1))
    events: tuple[ReplicaEvent, ...] = ()

    @trajectories.validator
    def _check_ids(self, _attribute: Attribute[Any], value: tuple[TraceTrajectory, ...]) -> None:
        name, times = Counter(each.trajectory_id for each in value).most_common(1)[0]
        if times > 1:
            raise ValueError(f"{times} trajectories have the id {name!r}")


@frozen(kw_only=True)
class ReplicaModel:
    """
    What a replica's work costs; the defaults are of the order of a 7B model on one H100.

    Attributes:
        step_s: of a decode step, whatever is in it.
        request_s: added by each running request.
        token_s: added by each context token of these.
        prefill_token_s: per token that no cache holds.
        max_in_flight: requests that run at once; others wait in order of arrival.
        cache_tokens: size of the prefix cache.
    """

    step_s: float = field(default=0.008, validator=_more_than_0)
    request_s: float = field(default=2e-5, validator=_seconds)
    token_s: float = field(default=3e-8, validator=_seconds)
    prefill_token_s: float = field(default=3e-5, validator=_seconds)
    max_in_flight: int = field(default=64, validator=_at_least_1)
    cache_tokens: int = field(default=400_000, validator=_at_least_0)


@define(eq=False)
class _Running:
    """A trajectory under way; `context` is what the turn that runs or comes next begins with."""

    plan: TraceTrajectory
    context: int
    turn: int = 0
    replica: int | None = None

    @property
    def num_new_tokens(self) -> int:
        return self.plan.turns[self.turn].num_new_tokens

    @property
    def keys(self) -> tuple[_Key, _Key]:
        """Name of what it added to the prompt, and of the prompt."""
        own, group = self.plan.trajectory_id, self.plan.group_id
        return ("own", own), ("group", group) if group else ("prompt", own)


@define(eq=False)
class _PrefixCache:
    """Prompts by group and what trajectories added, the least recently used first."""

    capacity: int
    entries: OrderedDict[_Key, int] = field(factory=OrderedDict)
    size: int = 0

    def held(self, who: _Running) -> int:
        """Return how many tokens of a context are here."""
        own, prompt = who.keys
        held = min(self.entries.get(prompt, 0), who.plan.num_prompt_tokens)
        if held == who.plan.num_prompt_tokens:
            held += self.entries.get(own, 0)
        return min(held, who.context)

    def keep(self, who: _Running, context: int) -> None:
        """Hold a context; the prompt goes last, so that it outlives what was built on it."""
        own, prompt = who.keys
        for key, num_tokens in (own, context - who.plan.num_prompt_tokens), (prompt, who.plan.num_prompt_tokens):
            before = self.entries.pop(key, 0)
            self.entries[key] = max(before, num_tokens)
            self.size += self.entries[key] - before
        while self.size > self.capacity:
            self.size -= self.entries.popitem(last=False)[1]


@define(eq=False)
class _Replica:
    """
    A server. `steps` counts decode steps, so a request that is to sample n tokens ends at the step it began plus n.

    `prefill_s` is work that goes before decoding, `context` the tokens that a decode step reads, `num_tokens` what a
    router sees: the contexts of all requests here, as they were sent.
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
    running: list[tuple[float, int, _Running]] = field(factory=list)
    queue: deque[_Running] = field(factory=deque)
    _order: count[int] = field(factory=count)

    def load(self) -> ReplicaLoad:
        num_requests = len(self.running) + len(self.queue)
        return ReplicaLoad(num_requests=num_requests, num_tokens=self.num_tokens, available=self.available)

    def add(self, who: _Running) -> None:
        self.num_tokens += who.context
        self.queue.append(who)
        self._admit()

    def next_finish(self) -> float:
        """Return when the next request ends, if nothing else happens."""
        if not self.running:
            return math.inf
        steps = max(0.0, self.running[0][0] - self.steps)
        first_s, growth_s = self._step_s()
        return self.now + (self.prefill_s + steps * (first_s + growth_s * steps / 2)) / self.speed

    def advance(self, now: float) -> None:
        """Work until `now`, which is not after the next finish."""
        work_s, self.now = (now - self.now) * self.speed, now
        self.prefill_s, work_s = max(0.0, self.prefill_s - work_s), work_s - self.prefill_s
        if self.running and work_s > 0:
            first_s, growth_s = self._step_s()
            # The root of first * n + growth * n^2 / 2 = work, in the form that stays exact for growth near 0.
            steps = 2 * work_s / (first_s + math.sqrt(first_s**2 + 2 * growth_s * work_s))
            self.steps += steps
            self.context += steps * len(self.running)

    def finish(self) -> _Running:
        """End the request that `next_finish` is about, once `now` is there."""
        self.steps, _, who = heappop(self.running)
        end = who.context + who.num_new_tokens
        self.context = self.context - end if self.running else 0.0
        self.num_tokens -= who.context
        self.cache.keep(who, end)
        self._admit()
        return who

    def fail(self) -> tuple[list[_Running], int]:
        """Lose everything; return the requests that were here, in order of arrival, and how much they had sampled."""
        begun = sorted(self.running, key=lambda each: each[1])
        lost = sum(int(who.num_new_tokens - (end - self.steps)) for end, _, who in begun)
        orphans = [who for _, _, who in begun] + list(self.queue)
        self.running, self.queue, self.cache = [], deque(), _PrefixCache(self.model.cache_tokens)
        self.prefill_s, self.context, self.num_tokens = 0.0, 0.0, 0
        return orphans, lost

    def _step_s(self) -> tuple[float, float]:
        """Return what the next decode step takes, and by how much each one takes longer than the one before."""
        model, num_running = self.model, len(self.running)
        first_s = model.step_s + model.request_s * num_running + model.token_s * self.context
        return first_s, model.token_s * num_running

    def _admit(self) -> None:
        while self.queue and len(self.running) < self.model.max_in_flight:
            who = self.queue.popleft()
            held = self.cache.held(who)
            self.num_cached_tokens += held
            self.prefill_s += (who.context - held) * self.model.prefill_token_s
            self.context += who.context
            self.cache.keep(who, who.context)
            heappush(self.running, (self.steps + who.num_new_tokens, next(self._order), who))


@frozen(kw_only=True)
class RoutingResult:
    """
    What a router made of a trace.

    Attributes:
        makespan_s: when the last trajectory ended.
        prefix_hit_rate: context tokens that a cache held, of all that were sent.
        balance: the largest over the mean outstanding tokens of the available replicas, each integrated over time; 1
            is even.
        num_moves: requests that went to another replica than the one before of their trajectory.
        num_requests: sent, those that a dying replica lost included.
        num_new_tokens: sampled and kept.
        num_lost_tokens: sampled by replicas that died before the turn had ended.
    """

    makespan_s: float
    prefix_hit_rate: float
    balance: float
    num_moves: int
    num_requests: int
    num_new_tokens: int
    num_lost_tokens: int


def simulate(trace: Trace, router: Router, num_replicas: int, model: ReplicaModel | None = None) -> RoutingResult:
    """
    Replay a trace over a router.

    Raises:
        ConfigError: fewer than 1 replica.
        EngineError: no replica was available, or the router chose one that was not.
    """
    if num_replicas < 1:
        raise ConfigError(f"replicas: {num_replicas} is not at least 1")
    return _Simulation(router, [_Replica(model or ReplicaModel()) for _ in range(num_replicas)]).run(trace)


@define(eq=False)
class _Simulation:
    """Events in order of time; of one time, in the order in which they were made."""

    router: Router
    replicas: list[_Replica]
    now: float = 0.0
    largest: float = 0.0
    mean: float = 0.0
    totals: Counter[str] = field(factory=Counter)
    _events: list[tuple[float, int, _Running | ReplicaEvent]] = field(factory=list)
    _order: count[int] = field(factory=count)

    def run(self, trace: Trace) -> RoutingResult:
        for event in trace.events:
            if event.replica < len(self.replicas):
                self._schedule(event.at_s, event)
        for plan in trace.trajectories:
            self._schedule(plan.arrival_s, _Running(plan, plan.num_prompt_tokens))
        num_left = len(trace.trajectories)
        while num_left:
            num_left -= self._step()
        return RoutingResult(
            makespan_s=self.now,
            prefix_hit_rate=sum(replica.num_cached_tokens for replica in self.replicas) / self.totals["sent_tokens"],
            balance=self.largest / self.mean,
            num_moves=self.totals["moves"],
            num_requests=self.totals["requests"],
            num_new_tokens=self.totals["new_tokens"],
            num_lost_tokens=self.totals["lost_tokens"],
        )

    def _schedule(self, at_s: float, what: _Running | ReplicaEvent) -> None:
        heappush(self._events, (at_s, next(self._order), what))

    def _step(self) -> bool:
        """Go to the next event, and return whether it ended a trajectory."""
        finishes = [replica.next_finish() for replica in self.replicas]
        soonest = min(finishes)
        if not self._events or soonest <= self._events[0][0]:
            self._go_to(soonest)
            self._end_turn(self.replicas[finishes.index(soonest)].finish())
            return False
        at_s, _, what = heappop(self._events)
        self._go_to(at_s)
        if isinstance(what, ReplicaEvent):
            self._change(what)
        elif what.turn < len(what.plan.turns):
            self._send(what)
        else:
            self.router.release(what.plan.trajectory_id)
            return True
        return False

    def _go_to(self, now: float) -> None:
        tokens = [replica.num_tokens for replica in self.replicas if replica.available] or [0]
        self.largest += (now - self.now) * max(tokens)
        self.mean += (now - self.now) * sum(tokens) / len(tokens)
        self.now = now
        for replica in self.replicas:
            replica.advance(now)

    def _send(self, who: _Running) -> None:
        request = GenerateRequest(
            request_id=f"{who.plan.trajectory_id}-{self.totals['requests']}",
            trajectory_id=who.plan.trajectory_id,
            token_ids=np.broadcast_to(np.int32(0), (who.context,)),
            sampling=_SAMPLING,
            group_id=who.plan.group_id,
        )
        index = self.router.choose(request, [replica.load() for replica in self.replicas])
        if not (0 <= index < len(self.replicas) and self.replicas[index].available):
            raise EngineError(f"the router chose replica {index}, which is not available")
        moved = who.replica is not None and who.replica != index
        self.totals.update(moves=int(moved), requests=1, sent_tokens=who.context)
        who.replica = index
        self.replicas[index].add(who)

    def _end_turn(self, who: _Running) -> None:
        turn = who.plan.turns[who.turn]
        self.totals["new_tokens"] += turn.num_new_tokens
        who.context += turn.num_new_tokens + turn.num_observation_tokens
        who.turn += 1
        self._schedule(self.now + turn.tool_s, who)

    def _change(self, event: ReplicaEvent) -> None:
        replica = self.replicas[event.replica]
        replica.speed, replica.available = event.speed, event.available
        if not event.available:
            orphans, num_lost_tokens = replica.fail()
            self.totals["lost_tokens"] += num_lost_tokens
            for who in orphans:
                self._send(who)
