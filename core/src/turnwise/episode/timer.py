"""Deadlines of a running episode, and its requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from math import inf
from typing import Any

import structlog
from attrs import define, field

from turnwise.episode.containment import ContainedTask
from turnwise.episode.setup import EpisodeContext
from turnwise.errors import DeadlineExceeded, EpisodeAborted, Owner, TrajectoryError
from turnwise.options import Deadlines
from turnwise.types import GenerateRequest, GenerateResult


@define(eq=False)
class EpisodeTimer:
    """
    Ends an episode at its nearest deadline or when it is aborted.

    Both happen in two steps. First the engine is asked to abort the requests in flight, so that it returns the tokens
    that it has sampled. After `abort_grace_s` the agent's task is cancelled, whether the engine has returned or not.
    From then on the episode refuses every wait, so that code that was left behind cannot continue it.

    Attributes:
        deadlines: of the episode.
        context: engine and background tasks.
        activity: owner of the code that the episode waits for; a deadline counts as its fault.
        aborting: whether the episode was aborted.
        returned_at: time of the loop at which the last request returned.
    """

    deadlines: Deadlines
    context: EpisodeContext
    activity: Owner = "agent"
    aborting: bool = False
    _agent: ContainedTask[None] | None = field(default=None, init=False)
    returned_at: float = field(default=0.0, init=False)
    _has_ended: bool = field(default=False, init=False)
    _was_cancelled: bool = field(default=False, init=False)
    _episode_deadline: float = field(default=inf, init=False)
    _turn_deadline: float = field(default=inf, init=False)
    _abort_deadline: float = field(default=inf, init=False)
    # Whether the last request that returned was late. A later request on another record moves the deadline of the turn,
    # but gives no more time to requests in flight.
    _was_late: bool = field(default=False, init=False)
    _late: set[str] = field(factory=set, init=False)  # ids of late requests in flight
    # Request ids, and when to ask the engine to abort them; infinite once it was asked.
    _in_flight: dict[str, float] = field(factory=dict, init=False)
    _all_returned: asyncio.Event = field(factory=asyncio.Event, init=False)
    _alarm: asyncio.TimerHandle | None = field(default=None, init=False)
    _alarm_time: float = field(default=inf, init=False)

    async def run(self, agent: ContainedTask[None]) -> None:
        """Wait for the agent, and cancel it at the nearest deadline."""
        self._agent = agent
        now = asyncio.get_running_loop().time()
        self._episode_deadline = now + self.deadlines.episode_s
        if self.aborting:  # aborted after the worker registered the episode, but before its first step
            self._abort_deadline = now
        self._check()
        try:
            await agent.wait()
        finally:
            self._has_ended, self._was_cancelled = True, agent.cancelled
            if self._alarm is not None:
                self._alarm.cancel()
            # Both refer to the episode: with this cycle, only the garbage collector would free it and its arrays.
            self._agent = self._alarm = None

    async def generate(
        self, request: GenerateRequest, on_cut: Callable[[GenerateResult], object] | None = None
    ) -> GenerateResult:
        """Wait for the engine, until the nearest deadline and its grace period; `on_cut` is as in `Episode.sample`."""
        self._turn_deadline = asyncio.get_running_loop().time() + self.deadlines.turn_s
        deadline = min(self._turn_deadline, self._episode_deadline)
        self._in_flight[request.request_id] = deadline
        self._set_alarm(deadline)
        self.activity = "engine"
        try:
            sampling = self.context.engine.generate(request)
            result = await (sampling if on_cut is None else self._wait_or_cut(sampling, request.request_id, on_cut))
        except asyncio.CancelledError:
            # The agent continues with other requests. At the end of the episode the engine has been asked already.
            if self._in_flight[request.request_id] < inf:
                self.context.spawn(self._abort_request(request.request_id))
            if not self._is_cancelled():
                self.activity = "agent"
            raise
        finally:
            del self._in_flight[request.request_id]
            self._was_late = request.request_id in self._late
            self._late.discard(request.request_id)
            if not self._in_flight:
                self._all_returned.set()
                self._set_alarm(deadline)  # the alarm may be at the end of the grace period, which is over
        # Not in the `finally`: after an exception the driver reads whose code did not return.
        self.activity = "agent"
        self.returned_at = asyncio.get_running_loop().time()
        return result

    async def _wait_or_cut(
        self,
        sampling: Coroutine[Any, Any, GenerateResult],
        request_id: str,
        on_cut: Callable[[GenerateResult], object],
    ) -> GenerateResult:
        """Return the result of a request; when the caller is cancelled, hand over what an abort returns."""
        # In no task group: a group would cancel the request with its caller, and the sampled tokens would be lost.
        asking = asyncio.get_running_loop().create_task(sampling)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            try:
                if not asking.done() and self._in_flight[request_id] < inf and not self._is_cancelled():
                    self._in_flight[request_id] = inf
                    await self._abort_request(request_id)
                    await asyncio.wait((asking,), timeout=self.deadlines.abort_grace_s)
            finally:
                asking.cancel()
                await asyncio.wait((asking,))
                if not asking.cancelled() and asking.exception() is None:
                    on_cut(asking.result())
            raise

    @property
    def requests(self) -> tuple[list[str], float]:
        """The requests in flight, the oldest first, and the time of the loop at which the newest was sent."""
        return list(self._in_flight), self._turn_deadline - self.deadlines.turn_s

    async def wait_for_requests(self) -> None:
        """Wait at an abort until the requests of the other paths have returned."""
        # The first path that returns ends the episode. Its siblings would be cancelled, and their tokens lost. The loop
        # checks again because a path may send another request before this task runs. The timer bounds the wait.
        while self.aborting and self._in_flight:
            self._all_returned.clear()
            await self._all_returned.wait()

    def abort(self) -> None:
        """Stop the episode soon: requests in flight return their tokens, any other wait is cancelled."""
        self.aborting = True
        if self._agent is not None:  # else `run` reads the flag
            now = asyncio.get_running_loop().time()
            self._abort_deadline = now + self.deadlines.abort_grace_s if self._in_flight else now
            self._in_flight = dict.fromkeys(self._in_flight, now)
            self._check()

    def check_running(self) -> None:
        """Raise what ended the episode, if anything did."""
        if self.aborting or self._is_cancelled():
            raise self.stop_signal()
        if self._has_ended:
            raise TrajectoryError("the episode has ended")

    def stop_signal(self) -> EpisodeAborted | DeadlineExceeded:
        """Return the exception that ends the episode after the timer expired or the engine aborted a request."""
        if self.aborting:
            return EpisodeAborted("the run was asked to stop")
        now = asyncio.get_running_loop().time()
        if now >= self._episode_deadline:
            return DeadlineExceeded(f"the episode took longer than {self.deadlines.episode_s:g} s")
        if now >= self._turn_deadline or self._was_late:
            return DeadlineExceeded(f"the turn took longer than {self.deadlines.turn_s:g} s")
        return EpisodeAborted("the engine ended the request")

    def _is_cancelled(self) -> bool:
        return self._was_cancelled if self._agent is None else self._agent.cancelled

    def _check(self) -> None:
        """Abort requests at their time, cancel the agent at its own, and set the alarm to the next such time."""
        self._alarm, self._alarm_time = None, inf
        if self._agent is None or self._agent.cancelled:
            return
        now = asyncio.get_running_loop().time()
        for request_id, deadline in self._in_flight.items():
            if deadline <= now:
                self._in_flight[request_id] = inf
                if not self.aborting:
                    self._late.add(request_id)
                self.context.spawn(self._abort_request(request_id))
        grace_s = self.deadlines.abort_grace_s if self._in_flight else 0.0
        end = min(self._turn_deadline + grace_s, self._episode_deadline + grace_s, self._abort_deadline)
        if end <= now:
            self._agent.cancel()
        else:
            self._set_alarm(min((end, *self._in_flight.values())))

    async def _abort_request(self, request_id: str) -> None:
        seconds = self.deadlines.abort_grace_s
        try:
            await ContainedTask(self.context.engine.abort(request_id), "engine", "abort", seconds).wait(seconds)
        except Exception as error:  # noqa: BLE001 - the agent is cancelled after the grace period in any case
            structlog.get_logger().warning("abort failed", request=request_id, error=repr(error))

    def _set_alarm(self, time: float) -> None:
        # An alarm that is set earlier stays: deadlines move away with every turn, and `_check` sets the next alarm.
        if time < self._alarm_time and self._agent is not None:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = asyncio.get_running_loop().call_at(time, self._check)
            self._alarm_time = time
