"""
Requirements of every middleware, as plain functions without pytest.

A check takes a `MiddlewareProbe` and raises `AssertionError` with a text that describes the failure. The episodes are
run by the real driver, whose scripted model calls a tool; the driver compares every record with the sampled tokens. Not
covered: whether its changes are right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from attrs import evolve, field, frozen

from turnwise.protocols import Agent, Engine, Episode, Middleware, Postprocessor, Resources, Reward, Tool, ToolParser
from turnwise.types import Score, State, Status, TokenArray, TrajectoryScore
from turnwise_testing.checks.check import register
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.probes.agent import AddTool, AgentProbe, ProbeParser, Run, make_task, probe_resources
from turnwise_testing.probes.engine import expect, expect_equal

_MAX_TURNS: Final = 4


@frozen
class _ToolLoop:
    """Calls the tools that the model asks for, and observes their texts."""

    resources: Resources

    async def step(self, episode: Episode) -> str:
        chat, parser = self.resources.chat, self.resources.parser
        assert chat is not None
        assert parser is not None
        if episode.state == State.PENDING:
            episode.begin(chat.prompt(episode.messages))
            return State.GENERATING
        result = await episode.generate()
        text, calls = parser.parse(result.token_ids)
        episode.messages.append({"role": "assistant", "content": text})
        if not calls or len(episode.turn_records) == _MAX_TURNS:
            return State.TERMINATED
        for call in calls:
            answer = (await episode.call_tool(call)).text
            episode.messages.append({"role": "tool", "content": answer})
            episode.observe(_ids(chat.tokenizer.encode(answer or " ")))
        return State.GENERATING


def _ids(ids: Sequence[int]) -> TokenArray:
    import numpy as np

    return np.array(ids, np.int32)


class _Length:
    """The number of response tokens."""

    def score(self, episode: Episode) -> Score:
        return TrajectoryScore(value=float(episode.trajectory.num_response_tokens))


class _Nothing:
    """Adds no fields."""

    def process(self, batch: Any) -> Mapping[str, Any]:
        return {}


_PARTS: Final[Mapping[str, tuple[type, Callable[[], object]]]] = {
    "agents": (Agent, lambda: _ToolLoop(probe_resources())),
    "engines": (Engine, ScriptedEngine),
    "postprocessors": (Postprocessor, _Nothing),
    "rewards": (Reward, _Length),
    "tool_parsers": (ToolParser, lambda: ProbeParser(_chat())),
    "tools": (Tool, AddTool),
}
"""The protocol and an example of each kind of part that middleware may wrap."""
_LIFECYCLE: Final = ("start", "stop", "sleep", "wake_up", "update_weights")


def _chat() -> Any:
    return probe_resources().chat


@frozen(kw_only=True)
class MiddlewareProbe:
    """
    The probe of middleware.

    Attributes:
        make_middleware: builds it, as the registered factory does.
        num_tasks: number of episodes of the checks.
    """

    make_middleware: Callable[[], Middleware]
    num_tasks: int = field(default=6)

    async def run(self, number: int, middleware: Middleware | None = None) -> Run:
        """Run an episode inside of a middleware."""
        outer, plain = middleware or self.make_middleware(), probe_resources()
        tools = {name: wrapped(outer, "tools", tool) for name, tool in plain.tools.items()}
        resources = evolve(plain, tools=tools, parser=wrapped(outer, "tool_parsers", plain.parser))
        agents = AgentProbe(make_agent=lambda: _agent(outer, resources), resources=resources)
        reward: Any = wrapped(outer, "rewards", _Length())
        run = await agents.run(make_task(number), reward=reward)
        fault = run.result.fault
        text = f"{fault.owner} {fault.kind}: {fault.message}\n{fault.traceback}" if fault else ""
        expect(run.result.status is not Status.FAILED, f"the episode {number} failed: {text}")
        return run


def _agent(middleware: Middleware, resources: Resources) -> Agent:
    agent: Agent = wrapped(middleware, "agents", _ToolLoop(resources))
    return agent


def wrapped(middleware: Middleware, kind: str, part: Any) -> Any:
    """Return a part inside of a middleware, as a run builds it."""
    return middleware.wrap(kind, part, _chat()) if kind in middleware.kinds else part


MiddlewareCheck = Callable[[MiddlewareProbe], Coroutine[Any, Any, None]]

MIDDLEWARE_CHECKS: dict[str, MiddlewareCheck] = {}
"""Every check by the name of its function without `check_`."""


_check = register(MIDDLEWARE_CHECKS)


@_check
async def check_fulfils_the_protocol(probe: MiddlewareProbe) -> None:
    """The factory returns middleware that wraps at least one known kind of part."""
    middleware = probe.make_middleware()
    expect(isinstance(middleware, Middleware), "it is no Middleware: derive it from turnwise_middleware.Middleware")
    expect(bool(middleware.kinds), "it wraps no kind of part: override a method")
    expect(middleware.kinds <= _PARTS.keys(), f"it wraps unknown kinds: {sorted(middleware.kinds - _PARTS.keys())}")


@_check
async def check_wrapped_parts_fulfil_their_protocols(probe: MiddlewareProbe) -> None:
    """A wrapped part has the methods of its protocol, of an engine those of its lifecycle."""
    middleware = probe.make_middleware()
    for kind, (protocol, make) in _PARTS.items():
        part = wrapped(middleware, kind, make())
        names = _LIFECYCLE if kind == "engines" else [name for name in vars(protocol) if not name.startswith("_")]
        missing = [name for name in names if not hasattr(part, name)]
        expect(not missing, f"a wrapped part of the kind {kind} has no {', '.join(missing)}")


@_check
async def check_sampled_tokens_stay(probe: MiddlewareProbe) -> None:
    """Every sampled token is in a record as it was sampled, whatever the middleware does with texts and scores."""
    for number in range(probe.num_tasks):
        run = await probe.run(number)
        sampled = [token for answer in run.answers for token in answer.token_ids.tolist()]
        recorded = [
            int(token) for record in run.result.trajectories for token in record.response_ids[record.response_mask == 1]
        ]
        expect_equal(recorded, sampled, "sampled tokens in the record")


@_check
async def check_is_repeatable(probe: MiddlewareProbe) -> None:
    """The same episode has the same records and scores, by one object or by several."""
    middleware = probe.make_middleware()
    first = [_outcome(await probe.run(number, middleware)) for number in range(probe.num_tasks)]
    again = [_outcome(await probe.run(number, middleware)) for number in reversed(range(probe.num_tasks))]
    expect_equal(again[::-1], first, "records of the same episodes again")
    new = [_outcome(await probe.run(number)) for number in range(probe.num_tasks)]
    expect_equal(new, first, "records of the same episodes by new objects")


@_check
async def check_many_at_once_do_not_mix(probe: MiddlewareProbe) -> None:
    """One object serves many episodes at once, each as it does alone."""
    middleware = probe.make_middleware()
    alone = [_outcome(await probe.run(number, middleware)) for number in range(probe.num_tasks)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(probe.run(number, middleware)) for number in [*range(probe.num_tasks)] * 2]
    expect_equal([_outcome(task.result()) for task in tasks], alone * 2, "records of episodes at once")


@_check
async def check_the_lifecycle_of_an_engine_passes(probe: MiddlewareProbe) -> None:
    """A replica starts, sleeps, wakes up and stops inside of the middleware."""
    engine = ScriptedEngine()
    outer = wrapped(probe.make_middleware(), "engines", engine)
    await outer.start()
    await outer.stop()
    await outer.stop()


def _outcome(run: Run) -> tuple[object, ...]:
    return run.records, run.result.scores, run.result.messages, run.result.status


async def run_middleware_checks(probe: MiddlewareProbe) -> None:
    """Run checks one after the other; the first that fails raises."""
    for check in MIDDLEWARE_CHECKS.values():
        await check(probe)
