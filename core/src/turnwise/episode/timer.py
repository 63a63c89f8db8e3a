"""Deadlines of a running episode, and its requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import define, field

from turnwise.episode.setup import EpisodeContext
from turnwise.errors import DeadlineExceeded, EpisodeAborted, Owner
from turnwise.options import Deadlines
from turnwise.types import GenerateRequest, GenerateResult


@define(eq=False)
class EpisodeTimer:
    """
    Ends an episode at its nearest deadline or when it is aborted.

    Both happen in two steps. First the engine is asked to abort the requests in flight, so that it returns the tokens
    that it has sampled. After `abort_grace_s` the agent's task is cancelled, whether the engine has returned or not.

    Attributes:
        deadlines: of the episode.
        context: engine and background tasks.
        activity: owner of the code that the episode waits for; a deadline counts as its fault.
        aborting: whether the episode was aborted.
    """

    deadlines: Deadlines
    context: EpisodeContext
    activity: Owner = "agent"
    aborting: bool = False
    _timeout: asyncio.Timeout | None = field(default=None, init=False)
    _episode_deadline: float = field(default=float("inf"), init=False)
    _turn_deadline: float = field(default=float("inf"), init=False)
    _in_flight: set[str] = field(factory=set, init=False)
    _all_returned: asyncio.Event = field(factory=asyncio.Event, init=False)

    @contextmanager
    def running(self, timeout: asyncio.Timeout) -> Iterator[None]:
        """Keep `timeout` at the nearest deadline while the agent steps."""
        self._timeout = timeout
        self._episode_deadline = asyncio.get_running_loop().time() + self.deadlines.episode_s
        self._reschedule(0.0)
        if self.aborting:  # aborted after the worker registered the episode, but before its first step
            self.abort()
        try:
            yield
        finally:
            self._timeout = None

    @contextmanager
    def waiting_for(self, owner: Owner) -> Iterator[None]:
        """Set `activity` during a wait."""
        self.activity = owner
        yield
        # Not in a `finally`: after an exception the driver reads whose code did not return.
        self.activity = "agent"

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Wait for the engine, until the nearest deadline and its grace period."""
        loop, engine = asyncio.get_running_loop(), self.context.engine
        self._turn_deadline = loop.time() + self.deadlines.turn_s
        self._in_flight.add(request.request_id)
        self._all_returned.clear()
        # The timer cancels the agent only after the grace period: at the deadline itself the engine is asked to stop,
        # so that the sampled part of the turn comes back.
        self._reschedule(self.deadlines.abort_grace_s)
        deadline = min(self._turn_deadline, self._episode_deadline)
        soft = loop.call_at(deadline, lambda: self.context.spawn(engine.abort(request.request_id)))
        try:
            with self.waiting_for("engine"):
                return await engine.generate(request)
        finally:
            soft.cancel()
            self._in_flight.discard(request.request_id)
            if not self._in_flight:
                self._all_returned.set()
                self._reschedule(0.0)

    async def wait_for_requests(self) -> None:
        """Wait at an abort until the requests of the other paths have returned."""
        # The first path that returns ends the episode. Its siblings would be cancelled, and their tokens lost. The loop
        # checks again because a path may send another request before this task runs. The timer bounds the wait.
        while self.aborting and self._in_flight:
            await self._all_returned.wait()

    def abort(self) -> None:
        """Stop the episode soon: requests in flight return their tokens, any other wait is cancelled."""
        self.aborting = True
        # Before the first step `running` repeats the abort. After an expiry the agent is being cancelled already.
        if self._timeout is None or self._timeout.expired():
            return
        for request_id in self._in_flight:
            self.context.spawn(self.context.engine.abort(request_id))
        grace = self.deadlines.abort_grace_s if self._in_flight else 0.0
        self._timeout.reschedule(asyncio.get_running_loop().time() + grace)

    def stop_signal(self) -> EpisodeAborted | DeadlineExceeded:
        """Return the exception that ends the episode after the timer expired or the engine aborted a request."""
        if self.aborting:
            return EpisodeAborted("the run was asked to stop")
        now = asyncio.get_running_loop().time()
        if now >= self._episode_deadline:
            return DeadlineExceeded(f"the episode took longer than {self.deadlines.episode_s:g} s")
        if now >= self._turn_deadline:
            return DeadlineExceeded(f"the turn took longer than {self.deadlines.turn_s:g} s")
        return EpisodeAborted("the engine ended the request")

    def _reschedule(self, grace_s: float) -> None:
        # An abort has set a nearer time, and an expired timeout cannot be moved.
        if self._timeout is not None and not self.aborting and not self._timeout.expired():
            self._timeout.reschedule(min(self._turn_deadline, self._episode_deadline) + grace_s)
