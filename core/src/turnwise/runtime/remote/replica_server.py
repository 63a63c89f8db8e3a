"""
A replica's side of the wire: keeps the contexts of the trajectories that stick to it, and answers in batches.

It wraps any engine and knows nothing of Ray: messages come in through `receive` and leave through the `post` of each
worker, coalesced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np
from attrs import define, field

from turnwise.errors import AsleepError, ReplicaDiedError, TornWeightsError, TurnwiseError
from turnwise.protocols import Engine, ReplicaLoad
from turnwise.runtime.coalescing import Coalescer
from turnwise.runtime.wire import ToReplica, ToWorker, UnpackedRequest, pack_results, unpack_requests
from turnwise.types import GenerateRequest, GenerateResult, TokenArray

Post = Callable[[ToWorker], None]


@define(eq=False)
class Context:
    """The ids of one trajectory, grown in place."""

    _ids: TokenArray
    size: int = 0
    worker: str = ""

    @classmethod
    def empty(cls, worker: str = "") -> Context:
        """Return a context of no tokens."""
        return cls(np.empty(1024, np.int32), worker=worker)

    def extend(self, start: int, ids: TokenArray) -> None:
        """Set what follows the first `start` tokens."""
        stop = start + len(ids)
        if stop > len(self._ids):
            grown = np.empty(max(stop, 2 * len(self._ids)), np.int32)
            grown[:start] = self._ids[:start]
            self._ids = grown
        self._ids[start:stop] = ids
        self.size = stop

    def view(self) -> TokenArray:
        """Return the ids; a later `extend` does not change what is in the view."""
        return self._ids[: self.size]


@define(eq=False)
class _Outbox:
    """What goes to one worker with the next flush."""

    post: Post
    results: list[tuple[str, GenerateResult]] = field(factory=list)
    unknown: list[str] = field(factory=list)
    failed: list[tuple[str, str, str]] = field(factory=list)
    num_queued: int = 0
    messages: Coalescer = field(init=False)


@define(eq=False)
class ReplicaServer:
    """
    Serves the workers of a run from one engine.

    Attributes:
        engine: started.
        max_in_flight: most requests that the engine gets at once; the others wait here.
        coalesce_s: shortest time between two messages to a worker, while requests run.
        available: whether requests are taken; not while the engine sleeps.
        bytes_in: bytes of token columns received so far.
        bytes_out: bytes of token columns sent so far.
    """

    engine: Engine
    max_in_flight: int = 1024
    coalesce_s: float = 0.0
    available: bool = field(default=True, init=False)
    bytes_in: int = field(default=0, init=False)
    bytes_out: int = field(default=0, init=False)
    _contexts: dict[str, Context] = field(factory=dict, init=False)
    _outboxes: dict[str, _Outbox] = field(factory=dict, init=False)
    _running: dict[str, asyncio.Task[None]] = field(factory=dict, init=False)
    _num_tokens: int = field(default=0, init=False)
    _slots: asyncio.Semaphore = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Make room for `max_in_flight` requests."""
        self._slots = asyncio.Semaphore(self.max_in_flight)

    @property
    def load(self) -> ReplicaLoad:
        """What there is to do."""
        return ReplicaLoad(num_requests=len(self._running), num_tokens=self._num_tokens, available=self.available)

    def connect(self, worker: str, post: Post) -> None:
        """Say how messages reach a worker."""
        box = self._outboxes[worker] = _Outbox(post)
        box.messages = Coalescer(partial(self._flush, box), self.coalesce_s)

    def announce(self, *, available: bool) -> None:
        """Tell every worker, at once, whether to send requests here; those that come all the same are sent back."""
        self.available = available
        for box in self._outboxes.values():
            box.messages.now()

    def disconnect(self, worker: str) -> None:
        """Forget a worker that has gone, and its contexts; what it waits for goes on to its end and is dropped."""
        self._outboxes.pop(worker, None)
        self._contexts = {key: context for key, context in self._contexts.items() if context.worker != worker}

    def receive(self, worker: str, message: ToReplica, group: asyncio.TaskGroup) -> None:
        """Take a worker's message; requests run in `group`."""
        self.bytes_in += message.num_bytes
        for trajectory_id in message.released:
            self._contexts.pop(trajectory_id, None)
        for request in unpack_requests(message):
            self._admit(worker, request, group)
        for request_id in message.aborted:
            group.create_task(self._abort(request_id))
        for request_id in message.cancelled:
            if task := self._running.get(request_id):
                task.cancel()

    def _admit(self, worker: str, request: UnpackedRequest, group: asyncio.TaskGroup) -> None:
        context = self._contexts.get(request.trajectory_id)
        if context is None or context.size < request.num_known:
            if request.num_known:
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
        self._running[request.request_id] = group.create_task(self._serve(worker, full, context))

    async def _abort(self, request_id: str) -> None:
        with suppress(TurnwiseError):  # an engine that has stopped has nothing to abort
            await self.engine.abort(request_id)

    async def _serve(self, worker: str, request: GenerateRequest, context: Context) -> None:
        num_tokens = len(request.token_ids)
        self._num_tokens += num_tokens
        try:
            self._box(worker).num_queued += self._slots.locked()
            async with self._slots:
                self._refuse_if_asleep()
                result = await self.engine.generate(request)
            context.extend(num_tokens, result.token_ids)
            self._box(worker).results.append((request.request_id, result))
        except (ReplicaDiedError, TornWeightsError):
            raise  # it concerns them all: the actor ends, its requests go elsewhere, and the driver starts another
        except Exception as error:  # noqa: BLE001 - whatever else an engine raises belongs to this request alone
            known = isinstance(error, TurnwiseError) and not isinstance(error, AsleepError)
            kind = "EngineError" if known else type(error).__name__
            self._box(worker).failed.append((request.request_id, kind, str(error)))
        finally:
            self._num_tokens -= num_tokens
            del self._running[request.request_id]
        self._schedule(worker)

    def _refuse_if_asleep(self) -> None:
        if not self.available:
            raise AsleepError("the replica is asleep")

    def _box(self, worker: str) -> _Outbox:
        return self._outboxes.get(worker) or _Outbox(_drop)

    def _schedule(self, worker: str) -> None:
        if box := self._outboxes.get(worker):
            if self._running:
                box.messages.schedule()
            else:
                box.messages.now()  # nothing else will come to wait for

    def _flush(self, box: _Outbox) -> None:
        message = pack_results(
            box.results, unknown=box.unknown, failed=box.failed, num_queued=box.num_queued, load=self.load
        )
        box.results, box.unknown, box.failed, box.num_queued = [], [], [], 0
        self.bytes_out += message.num_bytes
        box.post(message)


def _drop(_message: ToWorker) -> None:
    """Send nothing: the worker has gone."""
