"""
The server of a replica: keeps the contexts of its trajectories, and returns results in batches.

It wraps any engine and does not depend on Ray. `receive` handles messages of workers. Replies leave, coalesced, through
a function for each worker.

Workers are told apart by the numbers of their channels: a worker that restarts, or connects again, is another one here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import count

import numpy as np
import structlog
from attrs import define, field
from structlog.contextvars import bind_contextvars

from turnwise.errors import AsleepError, ReplicaDiedError, TornWeightsError, TurnwiseError, describe, is_cancelled
from turnwise.protocols import Engine, ReplicaLoad
from turnwise.routing import episode_of
from turnwise.runtime.remote.admission import Admission
from turnwise.runtime.remote.coalescing import Coalescer
from turnwise.runtime.remote.wire import ToReplica, ToWorker, UnpackedRequest, pack_results, unpack_requests
from turnwise.types import GenerateRequest, GenerateResult, TokenArray
from turnwise.weights.sleep import SleepState

Post = Callable[[ToWorker], None]


@define(eq=False)
class Context:
    """The token ids of one trajectory, in a buffer that grows."""

    _ids: TokenArray
    size: int = 0
    worker: int = 0

    @classmethod
    def empty(cls, worker: int = 0) -> Context:
        return cls(np.empty(1024, np.int32), worker=worker)

    def extend(self, start: int, ids: TokenArray) -> None:
        """Replace everything after the first `start` tokens."""
        stop = start + len(ids)
        if stop > len(self._ids):
            # A new buffer of twice the size: views of the old one stay valid, and copies cost O(1) for each token.
            grown = np.empty(max(stop, 2 * len(self._ids)), np.int32)
            grown[:start] = self._ids[:start]
            self._ids = grown
        self._ids[start:stop] = ids
        self.size = stop

    def view(self) -> TokenArray:
        """Return the ids; a later `extend` at the end of the view does not change it."""
        return self._ids[: self.size]


@define(eq=False)
class _Outbox:
    """Replies that the next message to a worker will contain."""

    post: Post
    results: list[tuple[str, GenerateResult]] = field(factory=list)
    unknown: list[str] = field(factory=list)
    failed: list[tuple[str, str, str]] = field(factory=list)
    granted: list[str] = field(factory=list)
    num_queued: int = 0
    barrier: str = ""
    messages: Coalescer = field(init=False)


@define(eq=False)
class ReplicaServer:
    """
    Serves the workers of a run from one engine.

    Attributes:
        max_in_flight: most requests in the engine at once; others wait in the server.
        coalesce_s: shortest time in seconds between two messages to a worker while requests run.
    """

    engine: Engine
    max_in_flight: int = 1024
    coalesce_s: float = 0.0
    sleep_state: SleepState = field(factory=SleepState)
    bytes_in: int = field(default=0, init=False)
    bytes_out: int = field(default=0, init=False)
    _contexts: dict[str, Context] = field(factory=dict, init=False)
    _outboxes: dict[int, _Outbox] = field(factory=dict, init=False)
    _running: dict[str, tuple[int, asyncio.Task[None]]] = field(factory=dict, init=False)
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
        box = self._outboxes[worker] = _Outbox(post)
        box.messages = Coalescer(partial(self._flush, box), self.coalesce_s)

    async def announce(self) -> None:
        """Send the load to every worker now, and return when all have it: their later requests depend on it."""
        barriers = {worker: f"barrier {next(self._num_barriers)}" for worker in self._outboxes}
        for worker, barrier in barriers.items():
            self._outboxes[worker].barrier = barrier
        # All messages first, then the replies: the workers are told at the same time.
        async with asyncio.TaskGroup() as group:
            for worker, barrier in barriers.items():
                group.create_task(self._is_confirmed(worker, barrier))

    def disconnect(self, worker: int) -> None:
        """Forget a worker that has died or lost its channel: its contexts, and its requests, which run elsewhere."""
        self._outboxes.pop(worker, None)
        self._contexts = {key: context for key, context in self._contexts.items() if context.worker != worker}
        for asked, confirmed in self._unconfirmed.values():
            if asked == worker and not confirmed.done():
                confirmed.set_result(False)
        for sender, task in self._running.values():
            if sender == worker:
                task.cancel()

    def pardon(self) -> None:
        """Let suspects run beside other requests: the one that killed replicas was found."""
        self._admission.pardon()

    def receive(self, worker: int, message: ToReplica, group: asyncio.TaskGroup) -> None:
        """Handle a message of a worker; requests run in `group`."""
        self.bytes_in += message.num_bytes
        for trajectory_id in message.released:
            self._contexts.pop(trajectory_id, None)
        for request in unpack_requests(message):
            self._admit(worker, request, group, suspect=request.request_id in message.suspects)
        for request_id in message.confirmed:
            if request_id in self._unconfirmed and not (confirmed := self._unconfirmed[request_id][1]).done():
                confirmed.set_result(True)
        for request_id in message.aborted:
            group.create_task(self._abort(request_id))
        # After the new requests, since a message may contain a request and its cancellation.
        for request_id in message.cancelled:
            if running := self._running.get(request_id):
                running[1].cancel()

    def _admit(self, worker: int, request: UnpackedRequest, group: asyncio.TaskGroup, *, suspect: bool) -> None:
        context = self._contexts.get(request.trajectory_id)
        if context is None or context.size < request.num_known:
            if request.num_known:
                # The context was dropped here in the meantime. The worker sends the request again with all tokens.
                self._box(worker).unknown.append(request.request_id)
                self._schedule(worker)
                return
            context = self._contexts[request.trajectory_id] = Context.empty(worker)
        context.extend(request.num_known, request.new_ids)
        full = GenerateRequest(
            request_id=request.request_id,
            trajectory_id=request.trajectory_id,
            group_id=request.group_id,
            token_ids=context.view(),
            sampling=request.sampling,
            layout=request.layout,
        )
        # A worker that has connected again sends its requests again, while the engine may still end the first ones.
        earlier = self._running.get(request.request_id)
        serving = self._serve(worker, full, context, earlier and earlier[1], suspect=suspect)
        task = group.create_task(serving)
        self._running[request.request_id] = worker, task
        task.add_done_callback(partial(self._end, worker, request.request_id))

    def _end(self, worker: int, request_id: str, task: asyncio.Task[None]) -> None:
        # In a callback: a task that is cancelled before it runs never enters its `try` block.
        if self._running[request_id][1] is task:
            del self._running[request_id]
        self._schedule(worker)

    async def _abort(self, request_id: str) -> None:
        try:
            await self.engine.abort(request_id)
        except BaseException as error:
            if _is_own_end(error):
                raise
            # The request ends by itself. An error here would end the actor, with all of its requests.
            structlog.get_logger().warning("abort failed", request=request_id, reason=describe(error))

    async def _serve(
        self,
        worker: int,
        request: GenerateRequest,
        context: Context,
        earlier: asyncio.Task[None] | None,
        *,
        suspect: bool,
    ) -> None:
        # This task serves one request, so the key needs no end: lines that the engine logs meanwhile have it.
        bind_contextvars(key=episode_of(request.trajectory_id))
        num_tokens, request_id = len(request.token_ids), request.request_id
        self._num_tokens += num_tokens
        try:
            if earlier is not None:
                await asyncio.wait([earlier])
            self._box(worker).num_queued += self._admission.is_full
            alone = await self._admission.enter(alone=suspect)
            try:
                # The worker knows that a suspect runs alone before the suspect can end this process. And it has the
                # result before the next request can end it, which the worker would take for a death by the suspect.
                if not alone or await self._is_confirmed(worker, request_id, self._box(worker).granted):
                    await self._answer(worker, request, context)
                    if alone:
                        await self._is_confirmed(worker, request_id)
            finally:
                self._admission.leave()
        finally:
            self._num_tokens -= num_tokens

    async def _answer(self, worker: int, request: GenerateRequest, context: Context) -> None:
        try:
            # After the waits, in which the engine may have fallen asleep. The worker then asks another replica.
            self.sleep_state.check_serving()
            result = await self.engine.generate(request)
            # The worker sends the next request of this trajectory only after this result, so the context is unchanged.
            context.extend(len(request.token_ids), result.token_ids)
            self._box(worker).results.append((request.request_id, result))
        except (ReplicaDiedError, TornWeightsError):
            # No request can be served any more. The error ends the actor, its requests move, and the driver restarts
            # it.
            raise
        except BaseException as error:
            if _is_own_end(error):
                raise
            # Any other error of the engine concerns only this request, also one that would end the process.
            known = isinstance(error, TurnwiseError) and not isinstance(error, AsleepError)
            kind = "EngineError" if known else type(error).__name__
            self._box(worker).failed.append((request.request_id, kind, str(error)))

    async def _is_confirmed(self, worker: int, item: str, column: list[str] | None = None) -> bool:
        """Send a message, with an id in a column, and wait until its worker confirms the id; False if that is gone."""
        if (box := self._outboxes.get(worker)) is None:
            return False
        confirmed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._unconfirmed[item] = (worker, confirmed)
        if column is not None:
            column.append(item)
        box.messages.schedule()
        try:
            return await confirmed
        finally:
            del self._unconfirmed[item]

    def _box(self, worker: int) -> _Outbox:
        # Looked up for every use, not kept over an await: the worker may have disconnected, and reconnected, meanwhile.
        return self._outboxes.get(worker) or _Outbox(_noop)

    def _schedule(self, worker: int) -> None:
        if box := self._outboxes.get(worker):
            if self._running:
                box.messages.schedule()
            else:
                box.messages.flush()  # nothing runs, so no later result could join this message

    def _flush(self, box: _Outbox) -> None:
        message = pack_results(
            box.results,
            unknown=box.unknown,
            failed=box.failed,
            granted=box.granted,
            num_queued=box.num_queued,
            barrier=box.barrier,
            load=self.load,
        )
        box.results, box.unknown, box.failed, box.granted, box.num_queued, box.barrier = [], [], [], [], 0, ""
        self.bytes_out += message.num_bytes
        box.post(message)


def _is_own_end(error: BaseException) -> bool:
    """Return whether the running task is being cancelled or closed, and not something that the engine awaits."""
    return isinstance(error, asyncio.CancelledError | GeneratorExit) and is_cancelled()


def _noop(_message: ToWorker) -> None:
    """Drop a message to a dead worker."""
