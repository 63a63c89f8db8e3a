"""A worker's state about one replica: pending requests, the contexts that the replica holds, and the next message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from attrs import define, field

from turnwise.media import PictureName
from turnwise.protocols import ReplicaLoad
from turnwise.routing import episode_of
from turnwise.runtime.remote.coalescing import Coalescer
from turnwise.runtime.remote.contexts import ProvedPrefix, SentContext
from turnwise.runtime.remote.wire import SentPicture, ToReplica, pack_requests
from turnwise.types import GenerateRequest, GenerateResult, TokenArray

Send = Callable[[ToReplica | SentPicture], None]
UNAVAILABLE = ReplicaLoad(available=False)


@define(eq=False)
class PendingRequest:
    """
    A request without a result, with its number in the order of the first attempts.

    Attributes:
        max_deaths: deaths of replicas after which it must run alone.
        deaths: of replicas that had the request.
        alone: whether its replica runs nothing else now.
        aborted: its result may be incomplete, and is wanted soon.
        waiting: the wait for a replica, while no replica has the request.
        num_heard: ids that the listener of the request has heard.
        is_deaf: its listener hears no more: another replica may sample other ids than it has heard.
    """

    request: GenerateRequest
    number: int
    max_deaths: int
    deaths: int = 0
    alone: bool = False
    aborted: bool = False
    waiting: asyncio.Timeout | None = None
    num_heard: int = 0
    is_deaf: bool = False
    result: asyncio.Future[GenerateResult] = field(init=False)

    @property
    def is_suspect(self) -> bool:
        """Whether it must run alone."""
        return self.deaths >= self.max_deaths

    def hear(self, token_ids: TokenArray) -> None:
        """Let the listener hear the next ids of a replica."""
        if self.request.on_tokens is not None and not self.is_deaf:
            self.num_heard += len(token_ids)
            self.request.on_tokens(token_ids.tolist())


@define(eq=False)
class ReplicaLink:
    """
    A worker's state about one replica. A replica that restarts gets a new link.

    Attributes:
        send: sends a message; None while the replica is dead.
        reported: the load of all workers that the replica reported last.
        coalesce_s: shortest time in seconds between two messages.
        leaving: the replica gets no new requests.
        num_tokens: context tokens of the pending requests.
        num_sent_tokens: tokens of all messages so far.
        num_sent_pictures: pictures whose bytes were sent.
    """

    send: Send | None = None
    reported: ReplicaLoad = UNAVAILABLE
    coalesce_s: float = 0.0
    leaving: bool = False
    pending: dict[str, PendingRequest] = field(factory=dict)
    num_tokens: int = 0
    num_sent_tokens: int = 0
    num_sent_pictures: int = 0
    aborted: list[str] = field(factory=list)
    confirmed: list[str] = field(factory=list)
    cancelled: list[str] = field(factory=list)
    _contexts: dict[str, dict[str, SentContext]] = field(factory=dict)  # by episode and trajectory id
    _outbox: list[PendingRequest] = field(factory=list)
    _released: list[str] = field(factory=list)
    _messages: Coalescer = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._messages = Coalescer(self._flush, self.coalesce_s)

    @property
    def load(self) -> ReplicaLoad:
        """The load of the replica; unavailable while it is dead or leaving."""
        if self.send is None or self.leaving:
            return UNAVAILABLE
        # The last message has the load of all workers at its time. This worker's own load is known exactly, and may
        # have grown since, so that requests of one pass of the event loop do not all go to the same replica.
        reported = self.reported
        return ReplicaLoad(
            num_requests=max(reported.num_requests, len(self.pending)),
            num_tokens=max(reported.num_tokens, self.num_tokens),
            available=reported.available,
        )

    async def request(self, pending: PendingRequest) -> GenerateResult:
        """Return the replica's result, or raise the error that `pending.result` gets."""
        request = pending.request
        pending.alone, pending.result = False, asyncio.get_running_loop().create_future()
        pending.is_deaf = pending.num_heard > 0
        self.pending[request.request_id] = pending
        self.num_tokens += len(request.token_ids)
        self.post(pending)
        try:
            return await pending.result
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            self.drop_context(request.trajectory_id)
            raise
        finally:
            del self.pending[request.request_id]
            self.num_tokens -= len(request.token_ids)

    def post(self, pending: PendingRequest) -> None:
        """Put a request into the next message."""
        self._outbox.append(pending)
        self._messages.schedule()

    def abort(self, pending: PendingRequest) -> None:
        """Ask the replica to end a request early."""
        self.aborted.append(pending.request.request_id)
        self._messages.schedule()

    def confirm(self, request_id: str) -> None:
        """Confirm a barrier, the start of a suspect, or its result, after which the replica runs others."""
        self.confirmed.append(request_id)
        self._messages.schedule()

    def cancel(self, request_id: str) -> None:
        """Let the replica end a request without a waiting task."""
        self.cancelled.append(request_id)
        self._messages.schedule()

    def send_pictures(self, names: Iterable[PictureName]) -> None:
        """
        Send pictures of pending requests that the replica lacks.

        The request of another one was cancelled here meanwhile, which the replica learns next.
        """
        wanted = set(names)
        for pending in self.pending.values():
            for placed in pending.request.pictures:
                if self.send is not None and placed.picture.name in wanted:
                    wanted.discard(placed.picture.name)
                    self.num_sent_pictures += 1
                    self.send(SentPicture(picture=placed.picture))

    def hear(self, heard: Iterable[tuple[str, TokenArray]]) -> None:
        """Let the listeners of requests hear the next ids."""
        for request_id, token_ids in heard:
            if pending := self.pending.get(request_id):
                pending.hear(token_ids)

    def note_result(self, pending: PendingRequest, result: GenerateResult) -> None:
        """Note the sampled tokens, which the replica has appended to its context: the next request can omit them."""
        request = pending.request
        context = self._contexts.get(episode_of(request.trajectory_id), {}).get(request.trajectory_id)
        if context is not None and context.request_id == request.request_id:
            context.result = result.token_ids.copy()  # a view would keep the whole message alive

    def forget_context(self, trajectory_id: str) -> None:
        """Assume that the replica holds no token of a trajectory."""
        self._contexts.get(episode_of(trajectory_id), {}).pop(trajectory_id, None)

    def drop_context(self, trajectory_id: str) -> None:
        """Forget the tokens of a trajectory here and on the replica."""
        self.forget_context(trajectory_id)
        self._released.append(trajectory_id)
        self._messages.schedule()

    def release(self, episode: str) -> None:
        """Forget the tokens of all trajectories of an episode, here and on the replica."""
        ended = self._contexts.pop(episode, None)
        if ended and self.send is not None:
            self._released += ended
            self._messages.schedule()

    def _flush(self) -> None:
        # Without the requests that were cancelled before they were sent: they would leave a context on the replica.
        sent = [each for each in self._outbox if self.pending.get(each.request.request_id) is each]
        # A replica handles requests before the aborts of the same message. Some requests were aborted at another link.
        aborted = [*self.aborted, *(each.request.request_id for each in sent if each.aborted)]
        message = pack_requests(
            [(each.request, self._find_prefix(each.request)) for each in sent],
            aborted=dict.fromkeys(aborted),
            cancelled=self.cancelled,
            released=self._released,
            suspects=[each.request.request_id for each in sent if each.is_suspect],
            confirmed=self.confirmed,
            streamed=[each.request.request_id for each in sent if each.request.on_tokens and not each.is_deaf],
        )
        self._outbox, self.aborted, self.cancelled, self._released, self.confirmed = [], [], [], [], []
        self.num_sent_tokens += len(message.token_ids)
        if self.send is not None:
            self.send(message)

    def _find_prefix(self, request: GenerateRequest) -> ProvedPrefix:
        """Return the tokens of a request that the replica holds, and note that it will hold all of them."""
        contexts = self._contexts.setdefault(episode_of(request.trajectory_id), {})
        held = contexts.get(request.trajectory_id)
        if held is not None and (prefix := held.advance(request)) is not None:
            return prefix
        contexts[request.trajectory_id] = SentContext.start(request)
        return ProvedPrefix()
