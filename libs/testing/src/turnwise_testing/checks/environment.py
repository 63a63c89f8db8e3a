"""
Requirements of every environment, as plain functions without pytest.

A check takes an `EnvironmentProbe`. The agent `environment` of turnwise-environments plays environments.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from attrs import field, frozen

from turnwise.errors import DataError, ToolError, describe
from turnwise.media import decode_picture, read_picture
from turnwise.threads import in_thread
from turnwise.types import Task, ToolCall
from turnwise_testing.checks.check import Check, register
from turnwise_testing.probes.agent import make_task
from turnwise_testing.probes.engine import expect, expect_equal

GROUP: Final = "turnwise.environments"
"""The entry points of environments."""
GARBAGE = ("", " \n", "☃" * 50, "<tool_call>{", "-1", "null", "x" * 10_000)
"""Turns that mean nothing, as a model in training writes them."""
Seen = list[Mapping[str, Any]]
"""Observations as plain values."""
_NO_EPISODE: Final = "the actions of an episode are not known; its own EnvironmentSuite has them"


@frozen(kw_only=True)
class EnvironmentProbe:
    """
    The probe of an environment.

    Attributes:
        make_environment: returns a new one, as its registered class does.
        episode: actions that end an episode of `task` with `seed`; empty when they are not known.
    """

    make_environment: Callable[[], Any]
    episode: tuple[str | ToolCall, ...] = ()
    task: Task = field(factory=make_task)
    seed: int = 0

    @property
    def is_repeatable(self) -> bool:
        """Whether the environment says that equal actions give equal observations."""
        return bool(getattr(self.make_environment(), "repeatable", False))


ENVIRONMENT_CHECKS: dict[str, Check] = {}
_check = register(ENVIRONMENT_CHECKS)


@_check
def check_has_the_methods(probe: EnvironmentProbe) -> None:
    """The object has `reset`, `step` and `close`, and making it opens nothing that must be closed."""
    environment = probe.make_environment()
    for method in ("reset", "step", "close"):
        found = callable(getattr(environment, method, None))
        expect(found, f"{type(environment).__name__} has no {method}")


@_check
async def check_starts_with_an_observation(probe: EnvironmentProbe) -> None:
    """`reset` returns something to read, without a reward and without the end."""
    first = (await _play(probe, 0))[0]
    expect(bool(first["text"] or first["pictures"] or first["messages"]), "the first observation is empty")
    expect(first["reward"] == 0.0, f"reset returned a reward: {first}")
    expect(not first["ends"], f"reset returned the end: {first}")


@_check
async def check_pictures_can_be_shown(probe: EnvironmentProbe) -> str | None:
    """A picture of an observation is a whole file of a known type, upright, and no animation."""
    seen = await _play(probe, len(probe.episode))
    shown = [(number, data) for number, each in enumerate(seen) for data in each["pictures"]]
    if not shown:
        return "no observation of the episode has pictures"
    for number, data in shown:
        try:
            decode_picture(read_picture(data))
        except DataError as error:
            raise AssertionError(f"observation {number}: {error}") from error
    return None


@_check
async def check_episode_ends(probe: EnvironmentProbe) -> str | None:
    """The actions of `episode` end the episode, with its last action and not before."""
    if not probe.episode:
        return _NO_EPISODE
    ends = [each["ends"] for each in (await _play(probe, len(probe.episode)))[1:]]
    expect_equal(ends, [False] * (len(probe.episode) - 1) + [True], "the ends of the observations")
    return None


@_check
async def check_tools_have_schemas(probe: EnvironmentProbe) -> None:
    """The tools, if there are any, have descriptions in the OpenAI form and different names."""
    async with _open(probe) as (environment, _first):
        tools = list(getattr(environment, "tools", ()))
    names = [schema["function"]["name"] for schema in tools]
    expect(len(set(names)) == len(names), f"tools have equal names: {names}")
    for schema in tools:
        expect_equal(schema["type"], "function", "the type of a tool's schema")
        expect_equal(schema["function"]["parameters"]["type"], "object", "the type of a tool's parameters")


@_check
async def check_turn_without_an_action_is_no_failure(probe: EnvironmentProbe) -> None:
    """A turn that means nothing is answered, or refused with a `ToolError`; nothing else is raised."""
    for turn in GARBAGE:
        async with _open(probe) as (environment, _first):
            try:
                _plain(await call(environment.step, turn))
            except ToolError as error:
                expect(bool(str(error)), "a ToolError has no text for the model")


@_check
async def check_environments_do_not_mix(probe: EnvironmentProbe) -> str | None:
    """Two environments that take their steps in turn play as one alone does."""
    if not probe.is_repeatable:
        return "the environment is not repeatable"
    actions = probe.episode or GARBAGE[:1]
    alone = await _play(probe, len(actions))
    environments = (probe.make_environment(), probe.make_environment())
    seen: tuple[Seen, Seen] = ([], [])
    try:
        for each, its in zip(environments, seen, strict=True):
            its.append(_plain(await call(each.reset, probe.task, probe.seed)))
        for action in actions:
            for each, its in zip(environments, seen, strict=True):
                its.append(_plain(await call(each.step, action)))
    finally:
        for each in environments:
            await call(each.close)
    for its in seen:
        expect_equal(its, alone, "the observations of one among two")
    return None


@_check
async def check_repeats_itself(probe: EnvironmentProbe) -> str | None:
    """A repeatable environment answers the same task, seed and actions with the same observations."""
    if not probe.is_repeatable:
        return "the environment is not repeatable"
    first = await _play(probe, len(probe.episode))
    expect_equal(await _play(probe, len(probe.episode)), first, "the observations of a second episode")
    return None


@_check
async def check_closes_in_every_case(probe: EnvironmentProbe) -> None:
    """`close` works before `reset`, in the middle of an episode, and twice."""
    await call(probe.make_environment().close)
    environment = probe.make_environment()
    await call(environment.reset, probe.task, probe.seed)
    if probe.episode:
        await call(environment.step, probe.episode[0])
    await call(environment.close)
    await call(environment.close)


async def _play(probe: EnvironmentProbe, num_actions: int) -> Seen:
    """Return the observations of the first actions, after the one of `reset`."""
    async with _open(probe) as (environment, first):
        seen = [_plain(first)]
        for action in (probe.episode or GARBAGE[:1])[:num_actions]:
            seen.append(_plain(await call(environment.step, action)))
    return seen


@asynccontextmanager
async def _open(probe: EnvironmentProbe) -> AsyncIterator[tuple[Any, Any]]:
    """Yield a new environment and what its `reset` returned, and close it; the first error is raised."""
    environment = probe.make_environment()
    try:
        yield environment, await call(environment.reset, probe.task, probe.seed)
    except BaseException as error:
        try:
            await call(environment.close)
        except Exception as second:  # noqa: BLE001 - it follows from the first, which has the reason
            error.add_note(f"close failed too: {describe(second)}")
        raise
    await call(environment.close)


async def call(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a method that is sync, and then runs in a thread, or async."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    value = await in_thread(lambda: function(*arguments), {})  # a daemon: a method that hangs must not hold pytest
    return await value if inspect.isawaitable(value) else value


def _plain(value: Any) -> Mapping[str, Any]:
    """Check an observation, and return it as plain values."""
    if isinstance(value, str):
        return {"text": value, "pictures": (), "messages": (), "reward": 0.0, "ends": False}
    missing = [name for name in ("text", "messages", "reward", "done", "truncated") if not hasattr(value, name)]
    expect(not missing, f"{value!r} is no observation: it has no {', '.join(missing)}")
    expect(isinstance(value.text, str), f"the text of an observation is {value.text!r}")
    expect(math.isfinite(value.reward), f"the reward of an observation is {value.reward!r}")
    return {
        "text": value.text,
        "pictures": tuple(picture.data for picture in getattr(value, "pictures", ())),
        "messages": tuple(value.messages),
        "reward": value.reward,
        "ends": bool(value.done or value.truncated),
    }
