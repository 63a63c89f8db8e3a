"""
Agents, rewards, simulated users and postprocessors made from functions.

A sync function runs in a thread, because it may block; an async one runs on the event loop. Agents are async.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

from turnwise import Agent, Episode, Interaction, Message, Postprocessor, Reply, Reward, Score, State, Task
from turnwise.errors import ConfigError
from turnwise.threads import in_thread

Function = Callable[..., Any]


def is_async(func: Function) -> bool:
    """Return whether a function, or the call of an object, is a coroutine function."""
    return _is(inspect.iscoroutinefunction, func)


def yields_async(func: Function) -> bool:
    """Return whether a function, or the call of an object, is an async generator function."""
    return _is(inspect.isasyncgenfunction, func)


def _is(check: Callable[[object], bool], func: Function) -> bool:
    return check(func) or check(getattr(func, "__call__", None))  # noqa: B004 - the method is looked at, not called


def refuse_generator(func: Function, part: str) -> None:
    """Raise `ConfigError` for a function with `yield`: a call of it runs nothing and returns a generator."""
    if yields_async(func) or _is(inspect.isgeneratorfunction, func):
        raise ConfigError(f"{part} is a generator function; return the values instead, for example as a list")


@frozen(eq=False)
class FunctionReward:
    """A reward made from a sync function of an episode; the runtime calls it in a thread."""

    func: Function

    def score(self, episode: Episode) -> Score | Sequence[Score] | Awaitable[Score | Sequence[Score]]:
        scores: Score | Sequence[Score] | Awaitable[Score | Sequence[Score]] = self.func(episode)
        return scores

    def __call__(self, episode: Episode) -> Any:
        """Call the function, so that a decorated one is tested like any other."""
        return self.func(episode)


@frozen(eq=False)
class AsyncFunctionReward(FunctionReward):
    """A reward made from an async function of an episode."""

    async def score(self, episode: Episode) -> Score | Sequence[Score]:
        scores: Score | Sequence[Score] = await self.func(episode)
        return scores


def reward(func: Callable[[Episode], object]) -> FunctionReward:
    """
    Make a reward of a function. Also a decorator.

    Args:
        func: sync or async; it gets the episode and returns a number, a `Score`, or one of them for each record. An
            empty list leaves the episode unscored.

    Example:
        >>> @reward
        ... def is_short(episode):
        ...     return float(len(episode.messages[-1]["content"]) < 100)
    """
    refuse_generator(func, "a reward's function")
    return AsyncFunctionReward(func) if is_async(func) else FunctionReward(func)


@frozen(eq=False)
class FunctionAgent:
    """
    An agent whose step is an async function; a function that returns None has finished the episode.

    A function with several turns is one step. An interrupted one is called again with the turns that were sampled,
    unless it has the attribute `resumable` with the value False.
    """

    func: Function

    @property
    def resumable(self) -> bool:
        """Whether the function may be called again for an interrupted episode."""
        return bool(getattr(self.func, "resumable", True))

    async def step(self, episode: Episode) -> State | str:
        state: State | str | None = await self.func(episode)
        return State.TERMINATED if state is None else state


@frozen(eq=False)
class FunctionUser:
    """A simulated user made from a function of the conversation; it keeps nothing between its replies."""

    func: Function

    async def create(self, task: Task) -> None: ...

    async def respond(self, session: object, messages: Sequence[Message]) -> Reply:
        given = (messages,)
        answer = await self.func(*given) if is_async(self.func) else await in_thread(lambda: self.func(*given), {})
        if isinstance(answer, Reply):
            return answer
        if answer is None:
            return Reply(should_terminate=True)
        if not isinstance(answer, str):
            raise TypeError(f"the function returned {type(answer).__name__}, expected a text, a Reply or None")
        return Reply(content=answer)

    async def release(self, session: object) -> None: ...


@frozen(eq=False)
class FunctionPostprocessor:
    """A postprocessor made from a function of a `turnwise.PackedBatch`, which returns new fields by name."""

    func: Function

    def process(self, batch: object) -> Mapping[str, Any]:
        fields: Mapping[str, object] = self.func(batch)
        return fields


def _agent(func: Function) -> Agent:
    if not is_async(func):
        raise ConfigError("an agent's function must be async, because it waits for the model")
    return FunctionAgent(func)


MAKERS: Mapping[str, Callable[[Function], Agent | Interaction | Postprocessor | Reward]] = {
    "agents": _agent,
    "interactions": FunctionUser,
    "postprocessors": FunctionPostprocessor,
    "rewards": reward,
}
"""By kind: makes a part of a function with one positional parameter."""
