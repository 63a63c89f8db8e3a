"""
A worker's side of the wire: an engine client over many replicas.

It routes, sends only new tokens, coalesces what goes to one replica, and when a replica dies lets its requests go on
elsewhere from their own tokens. It knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from attrs import define, field

from turnwise.errors import AsleepError, EngineError, ReplicaDiedError
from turnwise.observer import LimitReached, RequestRouted, RouteKind
from turnwise.protocols import ReplicaLoad, Router
from turnwise.runtime.coalescing import Coalescer
from turnwise.runtime.wire import ToReplica, ToWorker, pack_requests, unpack_results
from turnwise.telemetry import Observers
from turnwise.types import Capabilities, GenerateRequest, GenerateResult

Send = Callable[[ToReplica], None]
_GONE = ReplicaLoad(available=False)


@define(eq=False)
class _Waiting:
    """A request that was sent and not answered."""

    request: GenerateRequest
    answered: asyncio.Future[GenerateResult]


@define(eq=False)
class _Link:
    """
    One replica as a worker sees it.

    Attributes:
        send: hands a message over; None while the replica is dead.
        known: by episode and trajectory id, how many tokens the replica holds.
        reported: the load it told last, of all workers.
    """

    send: Send | None
    reported: ReplicaLoad
    known: dict[str, dict[str, int]] = field(factory=dict)
    waiting: dict[str, _Waiting] = field(factory=dict)
    num_tokens: int = 0
    outbox: list[GenerateRequest] = field(factory=list)
    aborted: list[str] = field(factory=list)
    cancelled: list[str] = field(factory=list)
    released: list[str] = field(factory=list)
    messages: Coalescer = field(init=False)

    def num_known(self, trajectory_id: str) -> int:
        """Return how many tokens the replica holds."""
        return self.known.get(_episode_of(trajectory_id), {}).get(trajectory_id, 0)

    def learn(self, trajectory_id: str, num_tokens: int) -> None:
        """Note how many tokens the replica holds now."""
        self.known.setdefault(_episode_of(trajectory_id), {})[trajectory_id] = num_tokens

    def forget(self, trajectory_id: str) -> None:
        """Count on no token of it."""
        self.known.get(_episode_of(trajectory_id), {}).pop(trajectory_id, None)


@define(eq=False)
class ReplicaPool:
    """
    The `EngineClient` of a worker.

    Attributes:
        router: chooses a replica for a trajectory.
        capabilities: of the replicas, which are all alike.
        num_replicas: how many there are.
        coalesce_s: shortest time between two messages to a replica.
        revive_s: seconds to wait for a replica when all are dead.
        max_moves: how often one request may go on elsewhere.
        num_moves: requests that had to.
        num_sent_tokens: tokens that travelled to replicas.
    """

    router: Router
    capabilities: Capabilities
    num_replicas: int
    coalesce_s: float = 0.0
    revive_s: float = 60.0
    max_moves: int = 8
    num_moves: int = field(default=0, init=False)
    num_sent_tokens: int = field(default=0, init=False)
    _links: list[_Link] = field(init=False)
    _revived: asyncio.Event = field(factory=asyncio.Event, init=False)
    _given_up: bool = field(default=False, init=False)
    _obituary: str = field(default="none was ever there", init=False)
    _observers: Observers = field(factory=Observers, init=False)
    _worker: str = field(default="", init=False)
    _home: dict[str, int] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        """Begin with no replica."""
        self._links = [self._link() for _ in range(self.num_replicas)]

    # The engine client

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Continue a context on some replica; `EngineError` when all are dead or the engine refused."""
        for _ in range(self.max_moves + 1):
            index = await self._choose(request)
            try:
                return await self._ask(index, request)
            except ReplicaDiedError:
                self.num_moves += 1
            except AsleepError:
                self._links[index].reported = _GONE
        raise ReplicaDiedError(f"gave up after {self.max_moves} replicas died under one request: {self._obituary}")

    async def abort(self, request_id: str) -> None:
        """Ask the replica to end a request early."""
        for link in self._links:
            if request_id in link.waiting:
                link.aborted.append(request_id)
                link.messages.schedule()

    def release(self, trajectory_id: str) -> None:
        """Forget an episode: its trajectories are `trajectory_id` and those that begin with it and a slash."""
        self.router.release(trajectory_id)
        self._home.pop(trajectory_id, None)
        for link in self._links:
            ended = link.known.pop(trajectory_id, None)
            if ended and link.send is not None:
                link.released += ended
                link.messages.schedule()

    # What the runtime tells

    def observe(self, observers: Observers, worker: str) -> None:
        """Tell these observers what the router decides for the worker of this name, and what queues at replicas."""
        self._observers, self._worker = observers, worker

    def replica_up(self, index: int, send: Send) -> None:
        """Use a replica, new or restarted; it holds no tokens yet."""
        self._links[index] = self._link(send, ReplicaLoad())
        self._revived.set()

    def replica_down(self, index: int, reason: str) -> None:
        """Stop using a replica; what it was asked goes on elsewhere."""
        link, self._links[index] = self._links[index], self._link()
        self._obituary = reason
        if not any(other.send for other in self._links):
            self._revived.clear()
        for waiting in link.waiting.values():
            if not waiting.answered.done():
                waiting.answered.set_exception(ReplicaDiedError(reason))

    def give_up(self, reason: str) -> None:
        """Wait for no replica any more: requests fail at once."""
        self._obituary = reason
        self._given_up = True
        self._revived.set()

    def receive(self, index: int, message: ToWorker) -> None:
        """Take a replica's message."""
        link = self._links[index]
        link.reported = message.load
        if message.num_queued and self._observers.heard("on_limit_reached"):
            event = LimitReached(limit="runtime.ray.max_in_flight", count=message.num_queued, where=f"replica {index}")
            self._observers.emit("on_limit_reached", event)
        for request_id, result in unpack_results(message, index):
            if waiting := link.waiting.get(request_id):
                link.learn(waiting.request.trajectory_id, len(waiting.request.token_ids) + len(result.token_ids))
                _settle(waiting, result)
        for request_id in message.unknown:
            if waiting := link.waiting.get(request_id):
                link.forget(waiting.request.trajectory_id)
                link.outbox.append(waiting.request)
                link.messages.schedule()
        for request_id, kind, text in message.failed:
            if waiting := link.waiting.get(request_id):
                self._forget(link, waiting.request.trajectory_id)
                error = AsleepError(text) if kind == AsleepError.__name__ else None
                _settle(waiting, error or EngineError(text if kind == "EngineError" else f"{kind}: {text}"))

    # Inside

    async def _choose(self, request: GenerateRequest) -> int:
        if self._given_up:
            raise ReplicaDiedError(f"all {self.num_replicas} replicas are dead: {self._obituary}")
        if not self._revived.is_set():
            try:
                async with asyncio.timeout(self.revive_s):
                    await self._revived.wait()
            except TimeoutError:
                raise ReplicaDiedError(f"all {self.num_replicas} replicas are dead: {self._obituary}") from None
        if self._given_up:
            raise ReplicaDiedError(f"all {self.num_replicas} replicas are dead: {self._obituary}")
        loads = [self._load(link) for link in self._links]
        if not any(load.available for load in loads):
            raise AsleepError("every replica is asleep: wake them up before asking for tokens")
        if self._observers.heard("on_request_routed"):
            return self._choose_aloud(request, loads)
        return self.router.choose(request, loads)

    def _choose_aloud(self, request: GenerateRequest, loads: list[ReplicaLoad]) -> int:
        """Choose, and tell the observers how; what a router itself knows of the reason is only its business."""
        episode = _episode_of(request.trajectory_id)
        before = self._home.get(episode)
        decide = getattr(self.router, "decide", None)
        if decide is None:
            index, reason = self.router.choose(request, loads), ""
        else:
            decision = decide(request, loads)
            index, reason = decision.index, str(decision.reason)
        kind: RouteKind = "first" if before is None else "sticky" if before == index else "moved"
        self._home[episode] = index
        event = RequestRouted(
            trajectory_id=request.trajectory_id, replica=index, kind=kind, reason=reason or kind, worker=self._worker
        )
        self._observers.emit("on_request_routed", event)
        return index

    def _load(self, link: _Link) -> ReplicaLoad:
        # What others have there was told with the last answer; what this worker has is known exactly.
        if link.send is None:
            return _GONE
        told = link.reported
        return ReplicaLoad(
            num_requests=max(told.num_requests, len(link.waiting)),
            num_tokens=max(told.num_tokens, link.num_tokens),
            available=told.available,
        )

    async def _ask(self, index: int, request: GenerateRequest) -> GenerateResult:
        link = self._links[index]
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        link.waiting[request.request_id] = waiting
        link.num_tokens += len(request.token_ids)
        link.outbox.append(request)
        link.messages.schedule()
        try:
            return await waiting.answered
        except asyncio.CancelledError:
            link.cancelled.append(request.request_id)
            self._forget(link, request.trajectory_id)
            raise
        finally:
            del link.waiting[request.request_id]
            link.num_tokens -= len(request.token_ids)

    def _forget(self, link: _Link, trajectory_id: str) -> None:
        """Count on nothing that the replica holds of a trajectory, and let it forget that too."""
        link.forget(trajectory_id)
        link.released.append(trajectory_id)
        link.messages.schedule()

    def _link(self, send: Send | None = None, reported: ReplicaLoad = _GONE) -> _Link:
        link = _Link(send, reported)
        link.messages = Coalescer(partial(self._flush, link), self.coalesce_s)
        return link

    def _flush(self, link: _Link) -> None:
        # More known than there is would mean another record under the same id: then it is sent whole.
        known = [link.num_known(request.trajectory_id) for request in link.outbox]
        requests = [(r, n if n <= len(r.token_ids) else 0) for r, n in zip(link.outbox, known, strict=True)]
        message = pack_requests(requests, aborted=link.aborted, cancelled=link.cancelled, released=link.released)
        link.outbox, link.aborted, link.cancelled, link.released = [], [], [], []
        self.num_sent_tokens += len(message.token_ids)
        if link.send is not None:
            link.send(message)


def _episode_of(trajectory_id: str) -> str:
    return trajectory_id.partition("/")[0]


def _settle(waiting: _Waiting, answer: GenerateResult | EngineError) -> None:
    if waiting.answered.done():
        return
    if isinstance(answer, EngineError):
        waiting.answered.set_exception(answer)
    else:
        waiting.answered.set_result(answer)
