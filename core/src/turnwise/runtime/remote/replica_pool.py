"""
The engine client of a worker: routes requests over many replicas.

It sends only tokens that a replica does not hold yet, coalesces the messages to a replica, and repeats the requests of
a dead replica on another one. It does not depend on Ray.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from itertools import count

from attrs import define, field

from turnwise.errors import AsleepError, EngineError, ReplicaDiedError
from turnwise.events.dispatch import Observers
from turnwise.events.observer import LimitReached, RequestRouted, RouteKind
from turnwise.protocols import ReplicaLoad, Router
from turnwise.routing import checked_choice, episode_of
from turnwise.runtime.remote.admission import Admission
from turnwise.runtime.remote.coalescing import Coalescer
from turnwise.runtime.remote.wire import ToReplica, ToWorker, pack_requests, unpack_results
from turnwise.types import Capabilities, GenerateRequest, GenerateResult

Send = Callable[[ToReplica], None]
_UNAVAILABLE = ReplicaLoad(available=False)


class PoisonedRequestError(EngineError):
    """Replicas died while they ran this request, the last one while it ran nothing else."""


class _ReplicaLeftError(EngineError):
    """A replica left before the end of a request, which did not cause it."""


@define(eq=False)
class _PendingRequest:
    """
    A request without a result, with its number in the order of the first attempts.

    Attributes:
        deaths: of replicas that had the request.
        alone: whether its replica runs nothing else now.
    """

    request: GenerateRequest
    number: int
    deaths: int = 0
    alone: bool = False
    result: asyncio.Future[GenerateResult] = field(init=False)


@define(eq=False)
class _Link:
    """
    A worker's state about one replica. A replica that restarts gets a new link.

    Attributes:
        send: sends a message; None while the replica is dead.
        leaving: the replica gets no new requests.
        reported: the load of all workers that the replica reported last.
        known: number of tokens that the replica holds, by episode and trajectory id.
        num_tokens: context tokens of the pending requests.
    """

    send: Send | None
    reported: ReplicaLoad
    leaving: bool = False
    known: dict[str, dict[str, int]] = field(factory=dict)
    pending: dict[str, _PendingRequest] = field(factory=dict)
    num_tokens: int = 0
    outbox: list[_PendingRequest] = field(factory=list)
    aborted: list[str] = field(factory=list)
    confirmed: list[str] = field(factory=list)
    cancelled: list[str] = field(factory=list)
    released: list[str] = field(factory=list)
    messages: Coalescer = field(init=False)

    def num_known(self, trajectory_id: str) -> int:
        """Return how many tokens of a trajectory the replica holds."""
        return self.known.get(episode_of(trajectory_id), {}).get(trajectory_id, 0)

    def set_known(self, trajectory_id: str, num_tokens: int) -> None:
        """Record how many tokens of a trajectory the replica holds."""
        self.known.setdefault(episode_of(trajectory_id), {})[trajectory_id] = num_tokens

    def forget(self, trajectory_id: str) -> None:
        """Assume that the replica holds no token of a trajectory."""
        self.known.get(episode_of(trajectory_id), {}).pop(trajectory_id, None)


@define(eq=False)
class ReplicaPool:
    """
    The `EngineClient` of a worker.

    A dead replica rarely tells which of its requests killed it. So a request with which `max_deaths` replicas have died
    is a suspect: a replica runs it alone, and if this replica dies too, the request fails. The latest requests are
    tested first, because a request that kills a replica mostly does so at its start.

    Attributes:
        coalesce_s: shortest time in seconds between two messages to a replica.
        restart_timeout_s: longest wait in seconds for a restart while all replicas are dead.
        max_deaths: deaths of replicas after which a request is a suspect.
        num_migrations: requests that moved because their replica died.
    """

    router: Router
    capabilities: Capabilities
    num_replicas: int
    coalesce_s: float = 0.0
    restart_timeout_s: float = 60.0
    max_deaths: int = 2
    num_migrations: int = field(default=0, init=False)
    num_sent_tokens: int = field(default=0, init=False)
    _links: list[_Link] = field(init=False)
    _any_live: asyncio.Event = field(factory=asyncio.Event, init=False)
    _given_up: bool = field(default=False, init=False)
    _last_error: str = field(default="none was ever there", init=False)
    _observers: Observers = field(factory=Observers, init=False)
    _worker: str = field(default="", init=False)
    _last_replica: dict[str, int] = field(factory=dict, init=False)
    _suspects: Admission = field(factory=lambda: Admission(sys.maxsize), init=False)
    _numbers: count[int] = field(factory=count, init=False)

    def __attrs_post_init__(self) -> None:
        self._links = [self._make_link() for _ in range(self.num_replicas)]

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """
        Continue a context on some replica.

        Raises:
            EngineError: all replicas are dead or asleep, the engine refused the request, or the request kills replicas.
        """
        pending = _PendingRequest(request, next(self._numbers))
        # Ends: replicas that die again and again are given up, and sleeping ones are not chosen again.
        while True:
            # One suspect of this worker at a time: if it is the cause, `pardon` lets the others continue together.
            suspect = pending.deaths >= self.max_deaths
            if suspect and not await self._suspects.enter(alone=True):
                pending.deaths = 0
            try:
                index = await self._choose(request)
                if (result := await self._try(index, pending)) is not None:
                    return result
            finally:
                if suspect:
                    self._suspects.leave()

    async def abort(self, request_id: str) -> None:
        """Ask the replica of a request to end it early."""
        for link in self._links:
            if request_id in link.pending:
                link.aborted.append(request_id)
                link.messages.schedule()

    def release(self, trajectory_id: str) -> None:
        """Forget an episode: the trajectory of this id, and all whose ids continue it after a slash."""
        self.router.release(trajectory_id)
        self._last_replica.pop(trajectory_id, None)
        for link in self._links:
            ended = link.known.pop(trajectory_id, None)
            if ended and link.send is not None:
                link.released += ended
                link.messages.schedule()

    def observe(self, observers: Observers, worker: str) -> None:
        """Emit the router's decisions for the worker of this name, and requests that queue at replicas."""
        self._observers, self._worker = observers, worker

    def replica_up(self, index: int, send: Send) -> None:
        """Use a new or restarted replica; it holds no tokens yet."""
        self._links += [self._make_link() for _ in range(len(self._links), index + 1)]
        self._links[index] = self._make_link(send, ReplicaLoad())
        self._given_up = False
        self._any_live.set()

    async def retire(self, index: int) -> None:
        """Send a replica no more requests, and wait until its own have ended or `replica_down` moves them."""
        link = self._links[index]
        link.leaving = True
        self._note_dead()
        if link.pending:
            await asyncio.wait([pending.result for pending in link.pending.values()])

    def replica_down(self, index: int, reason: str, *, left: bool = False) -> None:
        """Stop using a replica; its requests are repeated on others. None is blamed if it `left`."""
        # A new link, because the tasks in `_request` still use the old one: each removes itself from it.
        link, self._links[index] = self._links[index], self._make_link()
        self._last_error = reason
        self._note_dead()
        for pending in sorted(link.pending.values(), key=lambda each: each.number, reverse=True):
            if not pending.result.done():
                pending.result.set_exception(_ReplicaLeftError(reason) if left else ReplicaDiedError(reason))

    def _note_dead(self) -> None:
        if not any(link.send and not link.leaving for link in self._links):
            self._any_live.clear()

    def pardon(self) -> None:
        """Forget the deaths of replicas: the request that caused them was found."""
        self._suspects.pardon()
        for link in self._links:
            for pending in link.pending.values():
                pending.deaths = 0

    def give_up(self, reason: str) -> None:
        """Fail all requests at once: no replica will be restarted."""
        self._last_error = reason
        self._given_up = True
        self._any_live.set()

    def receive(self, index: int, message: ToWorker) -> None:
        """Handle a message of a replica."""
        link = self._links[index]
        link.reported = message.load
        self._emit_queued(index, message.num_queued)
        for request_id, result in unpack_results(message, index):
            # A message of a dead predecessor meets a new link without its requests, and is dropped here.
            if pending := link.pending.get(request_id):
                # The replica has appended the sampled tokens to its context, so the next request can omit them.
                link.set_known(pending.request.trajectory_id, len(pending.request.token_ids) + len(result.token_ids))
                self._resolve(link, pending, result)
            else:
                self._confirm(link, request_id)
        for request_id in message.unknown:
            if pending := link.pending.get(request_id):
                # Sent again with all tokens, because none counts as known any more.
                link.forget(pending.request.trajectory_id)
                link.outbox.append(pending)
                link.messages.schedule()
        for request_id in message.granted:
            # The replica starts the request only after the confirmation: if it dies later, the request was alone.
            if pending := link.pending.get(request_id):
                pending.alone = True
                link.confirmed.append(request_id)
            else:
                link.cancelled.append(request_id)  # cancelled here, or sent by a dead predecessor of this worker
            link.messages.schedule()
        for request_id, kind, text in message.failed:
            if pending := link.pending.get(request_id):
                self._drop_context(link, pending.request.trajectory_id)
                error = AsleepError(text) if kind == AsleepError.__name__ else None
                self._resolve(link, pending, error or EngineError(text if kind == "EngineError" else f"{kind}: {text}"))
            else:
                self._confirm(link, request_id)
        if message.barrier:
            self._confirm(link, message.barrier)

    def _confirm(self, link: _Link, request_id: str) -> None:
        """Confirm a barrier, or the result of a suspect, after which the replica runs others."""
        link.confirmed.append(request_id)
        link.messages.schedule()

    def _resolve(self, link: _Link, pending: _PendingRequest, outcome: GenerateResult | EngineError) -> None:
        if pending.alone:
            self._confirm(link, pending.request.request_id)
        if pending.result.done():
            return
        if isinstance(outcome, EngineError):
            pending.result.set_exception(outcome)
        else:
            pending.result.set_result(outcome)

    async def _choose(self, request: GenerateRequest) -> int:
        if not self._given_up and not self._any_live.is_set():
            try:
                async with asyncio.timeout(self.restart_timeout_s):
                    await self._any_live.wait()
            except TimeoutError:
                raise self._all_dead() from None
        if self._given_up:
            raise self._all_dead()
        # No await from here until the request is in the outbox: the chosen replica is live when it is chosen, and if it
        # dies later, `replica_down` finds the request among the pending ones.
        loads = [self._load(link) for link in self._links]
        if not any(load.available for load in loads):
            raise AsleepError("every replica is asleep: wake them up before asking for tokens")
        heard = self._observers.heard("on_request_routed")
        index, reason = checked_choice(self.router, request, loads, explain=heard)
        if heard:
            self._emit_choice(request, index, reason)
        return index

    def _all_dead(self) -> ReplicaDiedError:
        return ReplicaDiedError(f"all {len(self._links)} replicas are dead: {self._last_error}")

    def _emit_queued(self, index: int, num_queued: int) -> None:
        if num_queued and self._observers.heard("on_limit_reached"):
            event = LimitReached(limit="runtime.ray.max_in_flight", count=num_queued, where=f"replica {index}")
            self._observers.emit("on_limit_reached", event)

    def _emit_choice(self, request: GenerateRequest, index: int, reason: str) -> None:
        episode = episode_of(request.trajectory_id)
        before = self._last_replica.get(episode)
        kind: RouteKind = "first" if before is None else "sticky" if before == index else "migrated"
        self._last_replica[episode] = index
        event = RequestRouted(
            trajectory_id=request.trajectory_id,
            key=episode,
            replica=index,
            kind=kind,
            reason=reason or kind,
            worker=self._worker,
        )
        self._observers.emit("on_request_routed", event)

    def _load(self, link: _Link) -> ReplicaLoad:
        if link.send is None or link.leaving:
            return _UNAVAILABLE
        # The last message has the load of all workers at its time. This worker's own load is known exactly, and may
        # have grown since, so that requests of one pass of the event loop do not all go to the same replica.
        reported = link.reported
        return ReplicaLoad(
            num_requests=max(reported.num_requests, len(link.pending)),
            num_tokens=max(reported.num_tokens, link.num_tokens),
            available=reported.available,
        )

    async def _try(self, index: int, pending: _PendingRequest) -> GenerateResult | None:
        """Return the result of a replica, or None if another one must run the request."""
        try:
            return await self._request(index, pending)
        except ReplicaDiedError as error:
            if pending.alone:
                text = f"{pending.deaths + 1} replicas died while they ran this request, the last ran nothing else"
                raise PoisonedRequestError(f"{text}: {error}") from None
            pending.deaths += 1
            self.num_migrations += 1
        except _ReplicaLeftError:
            self.num_migrations += 1
        except AsleepError:
            # The request crossed the replica's announcement. Do not choose this replica until it reports again.
            self._links[index].reported = _UNAVAILABLE
        return None

    async def _request(self, index: int, pending: _PendingRequest) -> GenerateResult:
        link, request = self._links[index], pending.request
        pending.alone, pending.result = False, asyncio.get_running_loop().create_future()
        link.pending[request.request_id] = pending
        link.num_tokens += len(request.token_ids)
        link.outbox.append(pending)
        link.messages.schedule()
        try:
            return await pending.result
        except asyncio.CancelledError:
            link.cancelled.append(request.request_id)
            self._drop_context(link, request.trajectory_id)
            raise
        finally:
            del link.pending[request.request_id]
            link.num_tokens -= len(request.token_ids)

    def _drop_context(self, link: _Link, trajectory_id: str) -> None:
        """Forget the tokens of a trajectory here and on the replica, where they may have changed unseen."""
        link.forget(trajectory_id)
        link.released.append(trajectory_id)
        link.messages.schedule()

    def _make_link(self, send: Send | None = None, reported: ReplicaLoad = _UNAVAILABLE) -> _Link:
        link = _Link(send, reported)
        link.messages = Coalescer(partial(self._flush, link), self.coalesce_s)
        return link

    def _flush(self, link: _Link) -> None:
        # A replica cannot know more tokens than there are, unless another record has the same id: then send all of
        # them.
        sent = [pending.request for pending in link.outbox]
        known = [link.num_known(request.trajectory_id) for request in sent]
        message = pack_requests(
            [(request, n if n <= len(request.token_ids) else 0) for request, n in zip(sent, known, strict=True)],
            aborted=link.aborted,
            cancelled=link.cancelled,
            released=link.released,
            suspects=[each.request.request_id for each in link.outbox if each.deaths >= self.max_deaths],
            confirmed=link.confirmed,
        )
        link.outbox, link.aborted, link.cancelled, link.released, link.confirmed = [], [], [], [], []
        self.num_sent_tokens += len(message.token_ids)
        if link.send is not None:
            link.send(message)
