"""Calls of the run's tools by an agent, on the tool sessions of its episode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from attrs import define, field

from turnwise import Episode, ToolCall, ToolResult
from turnwise.errors import EpisodeEnd
from turnwise.showing import cut_text
from turnwise_gateway.calls import CallRefusedError
from turnwise_gateway.session.options import SessionOptions

_CUT: Final = "...(truncated)..."


@define(eq=False)
class ToolRunner:
    """
    Runs the tool calls of a session; the core counts them, and gives each its deadline.

    Attributes:
        episode: that the calls belong to.
        options: limits.
        spawn: starts a task in a group that outlives every call.
        fail: ends the session with an error.
        finish: refuses further calls after a result that ends the episode.
        has_finished: a tool has ended the episode; the agent has a short time to end itself.
    """

    episode: Episode
    options: SessionOptions
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    fail: Callable[[Exception], None]
    finish: Callable[[], None]
    has_finished: bool = field(default=False, init=False)
    _num_calls: int = field(default=0, init=False)
    _running: set[asyncio.Task[None]] = field(factory=set, init=False)

    async def call(self, call: ToolCall) -> ToolResult:
        """Run a call, as `SessionBackend.call_tool` says."""
        self._num_calls += 1
        if self._num_calls > self.options.max_tool_calls:
            self.episode.record_metric("gateway/refused_tool_calls", 1)
            text = f"Error: this call was not run: the episode has made its {self.options.max_tool_calls} tool calls"
            return ToolResult(text=text, error=True)
        outcome: asyncio.Future[ToolResult] = asyncio.get_running_loop().create_future()
        # A separate task, so that the end of the session can end the call before the tools are released.
        task = self.spawn(self._run(call, outcome))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await outcome
        except asyncio.CancelledError:
            task.cancel()
            raise

    def close(self) -> None:
        """End the calls in flight."""
        for task in self._running:
            task.cancel()

    async def _run(self, call: ToolCall, outcome: asyncio.Future[ToolResult]) -> None:
        error: Exception
        try:
            result = await self.episode.call_tool(call)
        except asyncio.CancelledError:
            _refuse(outcome, CallRefusedError("session_closed", "the session is over"))
            raise
        except EpisodeEnd as end:
            error = end
            refusal = CallRefusedError("session_closed", str(end))
        except Exception as failure:  # noqa: BLE001 - it ends the session, and its agent reports it
            error = failure
            refusal = CallRefusedError("engine", "a service under the tool failed")
        else:
            if result.reward is not None:
                self.episode.memory.setdefault("tool_rewards", []).append(result.reward)
            if not outcome.done():  # else the client has left
                outcome.set_result(_shorten(result, self.options.max_tool_response_length))
            if result.ends_episode:
                self.has_finished = True
                self.finish()
            return
        self.fail(error)
        _refuse(outcome, refusal)


def _refuse(outcome: asyncio.Future[ToolResult], refusal: CallRefusedError) -> None:
    if not outcome.done():
        outcome.set_exception(refusal)


def _shorten(result: ToolResult, most: int) -> ToolResult:
    """Return a result with at most this number of characters of its text: both ends of a longer one."""
    if len(result.text) <= most:
        return result
    mark = _CUT if len(_CUT) < most else ""
    tail = (most - len(mark)) // 2
    return cut_text(result, most - len(mark) - tail, tail, mark)
