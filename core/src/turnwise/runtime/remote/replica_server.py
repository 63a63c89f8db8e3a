"""
The server of a replica: keeps the contexts of its trajectories, and returns results in batches.

It wraps any engine and does not depend on Ray. `receive` handles messages of workers. Replies leave, coalesced, through
a function for each worker.

Workers are told apart by the numbers of their channels: a worker that restarts, or connects again, is another one here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import count

import structlog
from attrs import define, evolve, field
from numpy.typing import ArrayLike
from structlog.contextvars import bind_contextvars

from turnwise.episode.engine_results import as_plain_result
from turnwise.errors import ReplicaDiedError, TornWeightsError, describe, is_cancelled, text_of
from turnwise.media import PictureName, PlacedPicture
from turnwise.protocols import Engine, ReplicaLoad
from turnwise.routing import episode_of
from turnwise.runtime.remote.admission import Admission
from turnwise.runtime.remote.coalescing import Coalescer
from turnwise.runtime.remote.contexts import Context
from turnwise.runtime.remote.picture_store import PictureStore
from turnwise.runtime.remote.wire import (
    PlacedName,
    SentPicture,
    ToReplica,
    ToWorker,
    UnpackedRequest,
    WantedPictures,
    aborted_result,
    name_error,
    pack_results,
    unpack_requests,
)
from turnwise.types import GenerateRequest, GenerateResult, as_token_array
from turnwise.weights.sleep import SleepState

Post = Callable[[ToWorker | WantedPictures], None]


@define(eq=False)
class _Client:
    """
    A connected worker.

    Attributes:
        contexts: by trajectory id.
        results: these and the following replies will be in the next message.
        heard: ids that requests have sampled since the last message.
        wanted: pictures to ask for next, in another message.
    """

    post: Post
    contexts: dict[str, Context] = field(factory=dict)
    results: list[tuple[str, GenerateResult]] = field(factory=list)
    unknown: list[str] = field(factory=list)
    failed: list[tuple[str, str, str]] = field(factory=list)
    granted: list[str] = field(factory=list)
    heard: dict[str, list[int]] = field(factory=dict)
    num_queued: int = 0
    barrier: str = ""
    wanted: list[PictureName] = field(factory=list)
    messages: Coalescer = field(init=False)
    asking: Coalescer = field(init=False)

    def ask(self, name: PictureName) -> None:
        """Ask for a picture soon, together with others."""
        self.wanted.append(name)
        self.asking.schedule()

    def post_wanted(self) -> None:
        names, self.wanted = tuple(self.wanted), []
        self.post(WantedPictures(names=names))


@define(eq=False)
class _Attempt:
    """
    A request that waits or runs. A worker that connects again sends its requests again, which then have two attempts.

    Attributes:
        pictures: of the request, which gets them before it is admitted.
        in_engine: whether the engine has it, and can abort it.
    """

    worker: int
    request: GenerateRequest
    context: Context
    pictures: Sequence[PlacedName] = ()
    in_engine: bool = False
    task: asyncio.Task[None] = field(init=False)


@define(eq=False)
class ReplicaServer:
    """
    Serves the workers of a run from one engine.

    Attributes:
        max_in_flight: most requests in the engine at once; others wait in the server.
        coalesce_s: shortest time in seconds between two messages to a worker while requests run.
        bytes_in: of all messages that came, pictures included.
        bytes_out: of all messages to workers.
        picture_bytes_in: of the pictures that came.
    """

    engine: Engine
    max_in_flight: int = 1024
    coalesce_s: float = 0.0
    sleep_state: SleepState = field(factory=SleepState)
    pictures: PictureStore = field(factory=PictureStore)
    bytes_in: int = field(default=0, init=False)
    bytes_out: int = field(default=0, init=False)
    picture_bytes_in: int = field(default=0, init=False)
    _clients: dict[int, _Client] = field(factory=dict, init=False)
    _running: dict[str, list[_Attempt]] = field(factory=dict, init=False)
    _num_tokens: int = field(default=0, init=False)
    _admission: Admission = field(init=False)
    _unconfirmed: dict[str, tuple[int, asyncio.Future[bool]]] = field(factory=dict, init=False)
    _num_barriers: count[int] = field(factory=count, init=False)

    def __attrs_post_init__(self) -> None:
        self._admission = Admission(self.max_in_flight)

    @property
    def load(self) -> ReplicaLoad:
        """Requests in flight and queued, their tokens, and whether the engine serves."""
        available = self.sleep_state.level == 0
        return ReplicaLoad(num_requests=len(self._running), num_tokens=self._num_tokens, available=available)

    def connect(self, worker: int, post: Post) -> None:
        """Send the replies for a worker by this function."""
        client = self._clients[worker] = _Client(post)
        client.messages = Coalescer(partial(self._flush, client), self.coalesce_s)
        client.asking = Coalescer(client.post_wanted)

    async def announce(self) -> None:
        """Send the load to every worker now, and return when all have it: their later requests depend on it."""
        async with asyncio.TaskGroup() as group:
            for worker in self._clients:
                group.create_task(self._announce_to(worker))

    async def _announce_to(self, worker: int) -> None:
        # Set where the confirmation is awaited: from now on any message may contain the barrier.
        if worker in self._clients:
            barrier = self._clients[worker].barrier = f"barrier {next(self._num_barriers)}"
            await self._is_confirmed(worker, barrier)

    def disconnect(self, worker: int) -> None:
        """Forget a worker that has died or lost its channel: its contexts, and its requests, which run elsewhere."""
        self._clients.pop(worker, None)
        for asked, confirmed in self._unconfirmed.values():
            if asked == worker and not confirmed.done():
                confirmed.set_result(False)
        for attempts in self._running.values():
            _cancel(attempts, worker)

    def pardon(self) -> None:
        """Let suspects run beside other requests: the one that killed replicas was found."""
        self._admission.pardon()

    def receive(self, worker: int, message: ToReplica | SentPicture, group: asyncio.TaskGroup) -> None:
        """Handle a message of a worker; requests run in `group`."""
        self.bytes_in += message.num_bytes
        if isinstance(message, SentPicture):
            self.picture_bytes_in += message.num_bytes
            self.pictures.add(message.picture)
            return
        for trajectory_id in message.released:
            self._client(worker).contexts.pop(trajectory_id, None)
        for request in unpack_requests(message):
            suspect, streamed = (request.request_id in ids for ids in (message.suspects, message.streamed))
            self._admit(worker, request, group, suspect=suspect, streamed=streamed)
        for request_id in message.confirmed:
            asked, confirmed = self._unconfirmed.get(request_id, (worker, None))
            if asked == worker and confirmed and not confirmed.done():
                confirmed.set_result(True)
        # After the new requests, since a message may contain a request and its abort or cancellation.
        for request_id in message.aborted:
            self._abort(worker, request_id, group)
        for request_id in message.cancelled:
            _cancel(self._running.get(request_id, ()), worker)

    def _admit(
        self, worker: int, request: UnpackedRequest, group: asyncio.TaskGroup, *, suspect: bool, streamed: bool
    ) -> None:
        if (context := self._find_context(worker, request)) is None:
            # The worker sends the request again with all tokens.
            self._client(worker).unknown.append(request.request_id)
            self._schedule(worker)
            return
        full = GenerateRequest(
            request_id=request.request_id,
            trajectory_id=request.trajectory_id,
            group_id=request.group_id,
            token_ids=context.view(),
            sampling=request.sampling,
            layout=request.layout,
            grammar=request.grammar,
            on_tokens=partial(self._note_tokens, worker, request.request_id) if streamed else None,
        )
        attempt = _Attempt(worker, full, context, request.pictures)
        attempts = self._running.setdefault(request.request_id, [])
        # The engine may still end the earlier attempts of a worker that has connected again.
        serving = self._serve(attempt, [earlier.task for earlier in attempts], suspect=suspect)
        attempts.append(attempt)
        attempt.task = group.create_task(serving)
        attempt.task.add_done_callback(partial(self._end, attempt))

    def _note_tokens(self, worker: int, request_id: str, token_ids: ArrayLike) -> None:
        ids = as_token_array(token_ids).tolist()  # raises in the engine's call, so that only this request fails
        if client := self._clients.get(worker):
            client.heard.setdefault(request_id, []).extend(ids)
            client.messages.schedule()

    def _find_context(self, worker: int, request: UnpackedRequest) -> Context | None:
        """Return the context of a request, or None if its prefix is not held here."""
        # By channel: requests of a lost channel, which may still run, never reach the contexts of the next one.
        contexts = self._client(worker).contexts
        if not request.prefix.num_tokens:
            context = contexts[request.trajectory_id] = Context.start(request.request_id, request.new_ids)
            return context
        held = contexts.get(request.trajectory_id)
        return held if held and held.advance(request.request_id, request.prefix, request.new_ids) else None

    def _end(self, attempt: _Attempt, _task: asyncio.Task[None]) -> None:
        # In a callback: a task that is cancelled before it runs never enters its `try` block.
        attempts = self._running[attempt.request.request_id]
        attempts.remove(attempt)
        if not attempts:
            del self._running[attempt.request.request_id]
        self._schedule(attempt.worker)

    def _abort(self, worker: int, request_id: str, group: asyncio.TaskGroup) -> None:
        for attempt in self._running.get(request_id, ()):
            if attempt.in_engine:
                group.create_task(self._abort_in_engine(request_id))
            elif attempt.worker == worker:
                # The engine would ignore the abort of a request that it does not have yet.
                self._client(worker).results.append((request_id, aborted_result()))
                attempt.task.cancel()

    async def _abort_in_engine(self, request_id: str) -> None:
        try:
            await self.engine.abort(request_id)
        except BaseException as error:
            if _is_own_end(error):
                raise
            # The request ends by itself. An error here would end the actor, with all of its requests.
            structlog.get_logger().warning("abort failed", request=request_id, reason=describe(error))

    async def _serve(self, attempt: _Attempt, earlier: Collection[asyncio.Task[None]], *, suspect: bool) -> None:
        worker, request = attempt.worker, attempt.request
        # This task serves one request, so the key needs no end: lines that the engine logs meanwhile have it.
        bind_contextvars(key=episode_of(request.trajectory_id))
        num_tokens, request_id = len(request.token_ids), request.request_id
        self._num_tokens += num_tokens
        try:
            if earlier:
                await asyncio.wait(earlier)
            if attempt.pictures:
                await self._add_pictures(attempt)
            self._client(worker).num_queued += self._admission.is_full
            alone = await self._admission.enter(alone=suspect)
            try:
                # The worker knows that a suspect runs alone before the suspect can end this process. And it has the
                # result before the next request can end it, which the worker would take for a death by the suspect.
                if not alone or await self._is_confirmed(worker, request_id, self._client(worker).granted):
                    await self._answer(attempt)
                    if alone:
                        await self._is_confirmed(worker, request_id)
            finally:
                self._admission.leave()
        finally:
            self._num_tokens -= num_tokens

    async def _add_pictures(self, attempt: _Attempt) -> None:
        known, names = attempt.context.pictures, [name for _start, _num_tokens, name in attempt.pictures]
        lacking = [name for name in names if name not in known]
        found = await self.pictures.find(lacking, lambda name: self._ask(attempt.worker, name))
        held = {name: known.get(name) or found[name] for name in names}
        attempt.context.pictures = held
        placed = (
            PlacedPicture(start=start, num_tokens=num_tokens, picture=held[name])
            for start, num_tokens, name in attempt.pictures
        )
        attempt.request = evolve(attempt.request, pictures=tuple(placed))

    def _ask(self, worker: int, name: PictureName) -> None:
        # Without its worker, a request is being cancelled, and the next one that waits for the picture asks.
        if client := self._clients.get(worker):
            client.ask(name)

    async def _answer(self, attempt: _Attempt) -> None:
        request, worker = attempt.request, attempt.worker
        try:
            # After the waits, in which the engine may have fallen asleep. The worker then asks another replica.
            self.sleep_state.check_serving()
            attempt.in_engine = True
            # Checked here: a value that cannot be packed would cost the other results of the message.
            result = as_plain_result(await self.engine.generate(request))
            attempt.context.add_result(request.request_id, result.token_ids)
            self._client(worker).results.append((request.request_id, result))
        except (ReplicaDiedError, TornWeightsError):
            # No request can be served any more. The error ends the actor, its requests move, and the driver restarts
            # it.
            raise
        except BaseException as error:
            if _is_own_end(error):
                raise
            # Any other error of the engine concerns only this request, also one that would end the process.
            self._client(worker).failed.append((request.request_id, name_error(error), text_of(error)))

    async def _is_confirmed(self, worker: int, item: str, column: list[str] | None = None) -> bool:
        """Send a message, with an id in a column, and wait until its worker confirms the id; False if that is gone."""
        if (client := self._clients.get(worker)) is None:
            return False
        confirmed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._unconfirmed[item] = (worker, confirmed)
        if column is not None:
            column.append(item)
        client.messages.schedule()
        try:
            return await confirmed
        finally:
            del self._unconfirmed[item]

    def _client(self, worker: int) -> _Client:
        # Looked up for every use, not kept over an await: the worker may have disconnected, and reconnected, meanwhile.
        return self._clients.get(worker) or _Client(_noop)

    def _schedule(self, worker: int) -> None:
        if client := self._clients.get(worker):
            if self._running:
                client.messages.schedule()
            else:
                client.messages.flush()  # nothing runs, so no later result could join this message

    def _flush(self, client: _Client) -> None:
        message = pack_results(
            client.results,
            unknown=client.unknown,
            failed=client.failed,
            granted=client.granted,
            heard=client.heard.items(),
            num_queued=client.num_queued,
            barrier=client.barrier,
            load=self.load,
        )
        client.results, client.unknown, client.failed, client.granted = [], [], [], []
        client.num_queued, client.barrier, client.heard = 0, "", {}
        self.bytes_out += message.num_bytes
        client.post(message)


def _cancel(attempts: Iterable[_Attempt], worker: int) -> None:
    """Cancel the attempts that came over one channel of a worker."""
    for attempt in attempts:
        if attempt.worker == worker:
            attempt.task.cancel()


def _is_own_end(error: BaseException) -> bool:
    """Return whether the running task is being cancelled or closed, and not something that the engine awaits."""
    return isinstance(error, asyncio.CancelledError | GeneratorExit) and is_cancelled()


def _noop(_message: ToWorker | WantedPictures) -> None:
    """Drop a message to a dead worker."""
