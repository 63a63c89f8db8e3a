"""
The engine client of a worker: routes requests over many replicas.

It sends only tokens that a replica does not hold yet, coalesces the messages to a replica, and repeats the requests of
a dead replica on another one. It does not depend on Ray.
"""

from __future__ import annotations

import asyncio
import sys
from itertools import count

from attrs import define, field

from turnwise.errors import AsleepError, EngineError, ReplicaDiedError
from turnwise.events.dispatch import Observers
from turnwise.events.observer import LimitReached, RequestRouted, RouteKind
from turnwise.protocols import ReplicaLoad, Router
from turnwise.routing import checked_choice, episode_of
from turnwise.runtime.remote.admission import Admission
from turnwise.runtime.remote.replica_link import UNAVAILABLE, PendingRequest, ReplicaLink, Send
from turnwise.runtime.remote.wire import ToWorker, WantedPictures, aborted_result, read_error, unpack_results
from turnwise.types import Capabilities, GenerateRequest, GenerateResult


class PoisonedRequestError(EngineError):
    """Replicas died while they ran this request, the last one while it ran nothing else."""


class _ReplicaLeftError(EngineError):
    """A replica left before the end of a request, which did not cause it."""


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
        num_migrations: requests that another replica ran than the one before of their episode: the events with the
            kind `migrated`.
        num_resent: requests that were sent again because their replica died or left.
    """

    router: Router
    capabilities: Capabilities
    num_replicas: int
    coalesce_s: float = 0.0
    restart_timeout_s: float = 60.0
    max_deaths: int = 2
    num_migrations: int = field(default=0, init=False)
    num_resent: int = field(default=0, init=False)
    _num_sent_tokens: int = field(default=0, init=False)  # of links that were replaced
    _requests: dict[str, PendingRequest] = field(factory=dict, init=False)
    _links: list[ReplicaLink] = field(init=False)
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
        pending = PendingRequest(request, next(self._numbers), self.max_deaths)
        self._requests[request.request_id] = pending
        try:
            # Ends: replicas that die again and again are given up, and sleeping ones are not chosen again.
            while not pending.aborted:
                if (result := await self._attempt(pending)) is not None:
                    return result
            return aborted_result()
        finally:
            self._requests.pop(request.request_id, None)

    async def _attempt(self, pending: PendingRequest) -> GenerateResult | None:
        """Run a request on some replica; None if it must run again, or was aborted before a replica had it."""
        suspect = pending.is_suspect
        if (suspect or not self._any_live.is_set()) and not await self._wait_for_replica(pending, suspect=suspect):
            return None
        try:
            # No await from here until the request is in the outbox: the chosen replica is live when it is chosen, and
            # if it dies later, `replica_down` finds the request among the pending ones.
            return await self._try(self._choose(pending.request), pending)
        finally:
            if suspect:
                self._suspects.leave()

    async def _wait_for_replica(self, pending: PendingRequest, *, suspect: bool) -> bool:
        """Wait until a request may be sent; return False if it was aborted before."""
        try:
            async with asyncio.timeout(None) as pending.waiting:
                # One suspect of this worker at a time: if it is the cause, `pardon` lets the others continue together.
                if suspect and not await self._suspects.enter(alone=True):
                    pending.deaths = 0
                try:
                    await self._wait_until_live()
                except BaseException:
                    if suspect:
                        self._suspects.leave()
                    raise
        except TimeoutError:
            return False
        finally:
            pending.waiting = None
        return True

    async def abort(self, request_id: str) -> None:
        """Ask the replica of a request to end it early; a request that waits for a replica ends at once."""
        if (pending := self._requests.get(request_id)) is None or pending.aborted:
            return
        pending.aborted = True
        if pending.waiting is not None:
            pending.waiting.reschedule(asyncio.get_running_loop().time())
        for link in self._links:
            if request_id in link.pending:
                link.abort(pending)

    def locate_request(self, request_id: str) -> str:
        """Return the name of the replica that has a request."""
        found = (index for index, link in enumerate(self._links) if request_id in link.pending)
        return next((f"replica {index}" for index in found), "a replica that lives")

    def release(self, trajectory_id: str) -> None:
        """Forget an episode: the trajectory of this id, and all whose ids continue it after a slash."""
        self.router.release(trajectory_id)
        self._last_replica.pop(trajectory_id, None)
        for link in self._links:
            link.release(trajectory_id)

    @property
    def num_sent_pictures(self) -> int:
        """Pictures that were sent to the present replicas, over their present channels."""
        return sum(link.num_sent_pictures for link in self._links)

    @property
    def num_sent_tokens(self) -> int:
        """Tokens of all messages to replicas so far."""
        return self._num_sent_tokens + sum(link.num_sent_tokens for link in self._links)

    def observe(self, observers: Observers, worker: str) -> None:
        """Emit the router's decisions for the worker of this name, and requests that queue at replicas."""
        self._observers, self._worker = observers, worker

    def replica_up(self, index: int, send: Send) -> None:
        """Use a new or restarted replica; it holds no tokens yet."""
        self._links += [self._make_link() for _ in range(len(self._links), index + 1)]
        self._replace(index, self._make_link(send, ReplicaLoad()))
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
        # A new link, because requests still use the old one: each removes itself from it.
        link = self._replace(index, self._make_link())
        self._last_error = reason
        self._note_dead()
        for pending in sorted(link.pending.values(), key=lambda each: each.number, reverse=True):
            if not pending.result.done():
                pending.result.set_exception(_ReplicaLeftError(reason) if left else ReplicaDiedError(reason))

    def _make_link(self, send: Send | None = None, reported: ReplicaLoad = UNAVAILABLE) -> ReplicaLink:
        return ReplicaLink(send, reported, self.coalesce_s)

    def _replace(self, index: int, link: ReplicaLink) -> ReplicaLink:
        """Replace the link of a replica, and return the earlier one."""
        earlier, self._links[index] = self._links[index], link
        self._num_sent_tokens += earlier.num_sent_tokens
        return earlier

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

    def receive(self, index: int, message: ToWorker | WantedPictures) -> None:
        """Handle a message of a replica."""
        if isinstance(message, WantedPictures):
            self._links[index].send_pictures(message.names)
        else:
            self._handle_results(index, message)

    def _handle_results(self, index: int, message: ToWorker) -> None:
        link = self._links[index]
        link.reported = message.load
        self._emit_queued(index, message.num_queued)
        link.hear(message.heard)
        for request_id, result in unpack_results(message, index):
            # A message of a dead predecessor meets a new link without its requests, and is dropped here.
            if pending := link.pending.get(request_id):
                link.note_result(pending, result)
                self._resolve(link, pending, result)
            else:
                link.confirm(request_id)
        for request_id in message.unknown:
            if pending := link.pending.get(request_id):
                # Sent again with all tokens, because none counts as known any more.
                link.forget_context(pending.request.trajectory_id)
                link.post(pending)
        for request_id in message.granted:
            # The replica starts the request only after the confirmation: if it dies later, the request was alone.
            if pending := link.pending.get(request_id):
                pending.alone = True
                link.confirm(request_id)
            else:
                link.cancel(request_id)  # cancelled here, or sent by a dead predecessor of this worker
        for request_id, kind, text in message.failed:
            if pending := link.pending.get(request_id):
                link.drop_context(pending.request.trajectory_id)
                self._resolve(link, pending, read_error(kind, text))
            else:
                link.confirm(request_id)
        if message.barrier:
            link.confirm(message.barrier)

    def _resolve(self, link: ReplicaLink, pending: PendingRequest, outcome: GenerateResult | EngineError) -> None:
        if pending.alone:
            link.confirm(pending.request.request_id)
        if pending.result.done():
            return
        if isinstance(outcome, EngineError):
            pending.result.set_exception(outcome)
        else:
            pending.result.set_result(outcome)

    async def _wait_until_live(self) -> None:
        if not self._any_live.is_set():
            try:
                async with asyncio.timeout(self.restart_timeout_s):
                    await self._any_live.wait()
            except TimeoutError:
                raise self._all_dead() from None

    def _choose(self, request: GenerateRequest) -> int:
        if self._given_up:
            raise self._all_dead()
        loads = [link.load for link in self._links]
        if not any(load.available for load in loads):
            raise AsleepError("every replica is asleep: wake them up before asking for tokens")
        heard = self._observers.heard("on_request_routed")
        index, reason = checked_choice(self.router, request, loads, explain=heard)
        kind = self._note_choice(request, index)
        if heard:
            self._emit_choice(request, index, kind, reason)
        return index

    def _all_dead(self) -> ReplicaDiedError:
        return ReplicaDiedError(f"all {len(self._links)} replicas are dead: {self._last_error}")

    def _emit_queued(self, index: int, num_queued: int) -> None:
        if num_queued and self._observers.heard("on_limit_reached"):
            event = LimitReached(limit="runtime.ray.max_in_flight", count=num_queued, where=f"replica {index}")
            self._observers.emit("on_limit_reached", event)

    def _note_choice(self, request: GenerateRequest, index: int) -> RouteKind:
        episode = episode_of(request.trajectory_id)
        before = self._last_replica.get(episode)
        self._last_replica[episode] = index
        if before is None:
            return "first"
        self.num_migrations += before != index
        return "sticky" if before == index else "migrated"

    def _emit_choice(self, request: GenerateRequest, index: int, kind: RouteKind, reason: str) -> None:
        event = RequestRouted(
            trajectory_id=request.trajectory_id,
            key=episode_of(request.trajectory_id),
            replica=index,
            kind=kind,
            reason=reason or kind,
            worker=self._worker,
        )
        self._observers.emit("on_request_routed", event)

    async def _try(self, index: int, pending: PendingRequest) -> GenerateResult | None:
        """Return the result of a replica, or None if another one must run the request."""
        try:
            return await self._links[index].request(pending)
        except ReplicaDiedError as error:
            if pending.alone:
                text = f"{pending.deaths + 1} replicas died while they ran this request, the last ran nothing else"
                raise PoisonedRequestError(f"{text}: {error}") from None
            pending.deaths += 1
            self.num_resent += 1
        except _ReplicaLeftError:
            self.num_resent += 1
        except AsleepError:
            # The request crossed the replica's announcement. Do not choose this replica until it reports again.
            self._links[index].reported = UNAVAILABLE
        return None
