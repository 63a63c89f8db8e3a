"""Wrappers of parts, which call the methods of a middleware before and after the methods of the part."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from numbers import Real
from typing import Any, TypeVar

import structlog
from attrs import evolve, field, frozen

from turnwise import (
    Agent,
    Chat,
    Engine,
    Episode,
    Postprocessor,
    Reward,
    Score,
    Task,
    TokenScore,
    Tool,
    ToolCall,
    ToolParser,
    ToolResult,
    TrajectoryScore,
    TurnScore,
    Wrapper,
)
from turnwise.errors import EngineError, EpisodeEnd, InfrastructureError, ToolError, describe
from turnwise.threads import in_thread
from turnwise.types import JsonObject, TokenArray
from turnwise_middleware.interception import Interception, ToolUse

T = TypeVar("T")
_EPISODE: ContextVar[Episode | None] = ContextVar("turnwise_middleware_episode", default=None)
"""The episode whose step runs."""


class MiddlewareError(InfrastructureError):
    """A middleware raised, or returned something of a wrong type; its episode fails."""


@contextmanager
def _guarded(middleware: Interception, method: str) -> Iterator[None]:
    try:
        yield
    except (EpisodeEnd, EngineError, InfrastructureError):
        raise
    except Exception as error:
        kind = type(middleware)
        where = f"{method} of middleware {middleware.label!r} ({kind.__module__}.{kind.__qualname__})"
        raise MiddlewareError(f"{where}: {describe(error)}") from error


def _expect(value: object, types: type | tuple[type, ...], expected: str) -> None:
    if not isinstance(value, types):
        raise TypeError(f"it returned {value!r}, expected {expected}")


@frozen
class _ToolSession:
    inner: object
    task: Task
    state: dict[str, Any] = field(factory=dict)


class _Intercepted(Wrapper[T]):
    """A part whose calls a middleware sees; it has all other attributes of the part."""

    def __init__(self, inner: T, middleware: Interception, chat: Chat | None = None) -> None:
        super().__init__(inner)
        self._middleware = middleware
        self._chat = chat


class InterceptedTool(_Intercepted[Tool]):
    """A tool whose calls a middleware sees."""

    async def create(self, task: Task) -> _ToolSession:
        return _ToolSession(await self.inner.create(task), task)

    async def execute(self, session: _ToolSession, arguments: JsonObject) -> ToolResult:
        """Run a call, or what the middleware puts in its place."""
        name = self.inner.schema["function"]["name"]
        use = ToolUse(name=name, arguments=arguments, task=session.task, state=session.state)
        with _guarded(self._middleware, "before_tool"):
            before = await self._middleware.before_tool(use)
            _expect(before, (ToolResult, Mapping), "arguments or a ToolResult")
        if isinstance(before, ToolResult):
            return self._noted(before, "vetoed_call")
        changed = before is not arguments and before != arguments
        use = evolve(use, arguments=before)
        result = await self._run(session, before)
        with _guarded(self._middleware, "after_tool"):
            after = await self._middleware.after_tool(use, result)
            _expect(after, ToolResult, "a ToolResult")
        if after is not result and after != result:
            after = self._noted(after, "changed_result")
        return self._noted(after, "changed_arguments") if changed else after

    async def release(self, session: _ToolSession) -> float | None:
        reward: float | None = await self.inner.release(session.inner)
        return reward

    async def _run(self, session: _ToolSession, arguments: JsonObject) -> ToolResult:
        # As texts, so that the middleware sees everything that the model would read.
        try:
            result = await self.inner.execute(session.inner, arguments)
        except (InfrastructureError, EngineError, asyncio.CancelledError):
            raise
        except ToolError as error:
            return ToolResult(text=str(error), error=True)
        except Exception as error:  # noqa: BLE001 - a tool may raise anything; the model reads it
            text = f"Error: {type(error).__name__}" + (f": {error}" if str(error) else "")
            return ToolResult(text=text, error=True)
        if not isinstance(result, ToolResult):
            raise TypeError(f"the tool returned {type(result).__name__} in place of a ToolResult")
        return result

    def _noted(self, result: ToolResult, what: str) -> ToolResult:
        # In the result, which the journal keeps: a resumed episode has the note as well.
        note = f"middleware/{self._middleware.label}/{what}"
        return evolve(result, metrics={**result.metrics, note: result.metrics.get(note, 0.0) + 1.0})


class InterceptedSuspendableTool(InterceptedTool):
    """The same for a tool whose sessions can be suspended."""

    async def suspend(self, session: _ToolSession) -> dict[str, Any]:
        inner: Any = self.inner
        return {"notes": await inner.suspend(session.inner), "state": session.state}

    async def restore(self, task: Task, notes: Mapping[str, Any]) -> _ToolSession:
        inner: Any = self.inner
        return _ToolSession(await inner.restore(task, notes["notes"]), task, dict(notes["state"]))


class InterceptedParser(_Intercepted[ToolParser]):
    """A tool parser whose turns a middleware sees."""

    def parse(self, token_ids: TokenArray) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text and the calls; all is text where the middleware says so."""
        with _guarded(self._middleware, "before_parse"):
            is_parsed = self._middleware.before_parse(token_ids)
            _expect(is_parsed, bool, "True or False")
        if not is_parsed:
            _note(_EPISODE.get(), self._middleware, "vetoed_parse")
            return ("" if self._chat is None else self._chat.text(token_ids)), ()
        before = self.inner.parse(token_ids)
        with _guarded(self._middleware, "after_parse"):
            after: Any = self._middleware.after_parse(*before)
            _expect(after, tuple, "a text and calls")
            text, calls = after
            _expect(text, str, "a text and calls")
            calls = tuple(calls)
            for call in calls:
                _expect(call, ToolCall, "a text and calls")
        if (text, calls) != before:
            _note(_EPISODE.get(), self._middleware, "changed_parse")
        return text, calls


class InterceptedAgent(_Intercepted[Agent]):
    """An agent whose steps a middleware sees."""

    async def step(self, episode: Episode) -> str:
        """Make a step, unless the middleware names the next state."""
        token = _EPISODE.set(episode)
        try:
            with _guarded(self._middleware, "before_step"):
                state = await self._middleware.before_step(episode)
                _expect(state, (str, type(None)), "a state or None")
            if state is not None:
                _note(episode, self._middleware, "vetoed_step")
                return state
            before: str = await self.inner.step(episode)
            with _guarded(self._middleware, "after_step"):
                after = await self._middleware.after_step(episode, before)
                _expect(after, str, "a state")
            if after != before:
                _note(episode, self._middleware, "changed_state")
            return after
        finally:
            _EPISODE.reset(token)


class InterceptedReward(_Intercepted[Reward]):
    """A reward whose scores a middleware sees."""

    async def score(self, episode: Episode) -> tuple[Score, ...]:
        """Score an episode, unless the middleware does."""
        with _guarded(self._middleware, "before_reward"):
            given = await self._middleware.before_reward(episode)
            scores = None if given is None else _scores((given,))
        if scores is not None:
            _note(episode, self._middleware, "vetoed_reward")
            return scores
        before = _scores(await self._ask(episode))
        with _guarded(self._middleware, "after_reward"):
            after = _scores(await self._middleware.after_reward(episode, before))
        if after != before:
            _note(episode, self._middleware, "changed_reward")
        return after

    async def _ask(self, episode: Episode) -> object:
        score = self.inner.score
        is_async = inspect.iscoroutinefunction(score)
        answer = score(episode) if is_async else await in_thread(partial(score, episode), {})
        return await answer if inspect.isawaitable(answer) else answer


def _scores(answer: object) -> tuple[Score, ...]:
    scores = tuple(answer) if isinstance(answer, list | tuple) else (answer,)
    scores = tuple(TrajectoryScore(value=float(each)) if isinstance(each, Real) else each for each in scores)
    for each in scores:
        _expect(each, (TrajectoryScore, TurnScore, TokenScore), "a score for each record")
    return scores


class InterceptedPostprocessor(_Intercepted[Postprocessor]):
    """A postprocessor whose fields a middleware sees."""

    def process(self, batch: object) -> Mapping[str, Any]:
        """Return the new fields of a batch."""
        log = structlog.get_logger().bind(middleware=self._middleware.label)
        with _guarded(self._middleware, "before_postprocess"):
            runs = self._middleware.before_postprocess(batch)
            _expect(runs, bool, "True or False")
        if not runs:
            log.info("postprocessor vetoed", postprocessor=type(self.inner).__qualname__)
            return {}
        before = self.inner.process(batch)
        with _guarded(self._middleware, "after_postprocess"):
            after = self._middleware.after_postprocess(batch, before)
            _expect(after, Mapping, "fields by name")
        if after is not before:
            log.info("fields changed", postprocessor=type(self.inner).__qualname__, fields=sorted(after))
        return after


class InterceptedEngine(_Intercepted[Engine]):
    """An engine whose lifecycle a middleware sees; `generate` is the engine's own method."""

    async def start(self) -> None:
        await self._stage("start")

    async def sleep(self, level: int) -> None:
        await self._stage("sleep", level)

    async def wake_up(self, tags: Iterable[str]) -> None:
        await self._stage("wake_up", tags)

    async def update_weights(self, weights: Iterable[Any], version: int) -> None:
        await self._stage("update_weights", weights, version)

    async def stop(self) -> None:
        await self._stage("stop")

    async def _stage(self, stage: Any, *arguments: object) -> None:
        started = time.perf_counter()
        with _guarded(self._middleware, "before_engine"):
            await self._middleware.before_engine(stage)
        await getattr(self.inner, stage)(*arguments)
        with _guarded(self._middleware, "after_engine"):
            await self._middleware.after_engine(stage, time.perf_counter() - started)


def _note(episode: Episode | None, middleware: Interception, what: str) -> None:
    """Count a change in the metrics of an episode; a server's turns run outside of a step, and are only logged."""
    if episode is None:
        structlog.get_logger().info("changed by middleware", middleware=middleware.label, what=what)
    else:
        episode.record_metric(f"middleware/{middleware.label}/{what}", 1.0)
