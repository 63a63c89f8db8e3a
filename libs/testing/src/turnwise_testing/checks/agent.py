"""
Requirements of every agent, as plain functions without pytest.

A check takes an `AgentProbe` and raises `AssertionError` with a text that describes the failure. Not covered: the
purpose of an agent, which its own tests check.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from turnwise.errors import InvariantError
from turnwise.protocols import Agent, Episode, PromptingAgent, Tool
from turnwise.record.columns import Origin
from turnwise.record.invariants import check_sampled, check_trajectory
from turnwise.types import (
    Capabilities,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    MediaTokens,
    State,
    Status,
    Task,
    ToolResult,
    ToolSchema,
)
from turnwise_testing.checks.check import register
from turnwise_testing.checks.part import PartChecks
from turnwise_testing.engines.scripted import Failure, ScriptedEngine
from turnwise_testing.probes.agent import Abort, AgentProbe, Run, probe_resources
from turnwise_testing.probes.engine import expect, expect_equal

AgentCheck = Callable[[AgentProbe], Coroutine[Any, Any, None]]

AGENT_CHECKS: dict[str, AgentCheck] = {}
"""Every check by the name of its function without `check_`."""
AGENTS = PartChecks(
    checks=AGENT_CHECKS,
    probe=lambda part: AgentProbe(make_agent=part.make, resources=part.resources),
    resources=lambda _folder: probe_resources(),
)

_ENDED = (Status.COMPLETED, Status.TRUNCATED)
_SLOW_TURN_S = 10.0
"""So long that no turn ends before an abort or a deadline, also on a machine that delays these by seconds."""


_check = register(AGENT_CHECKS)


@_check
async def check_fulfils_the_protocol(probe: AgentProbe) -> None:
    """The factory returns something with the method of an agent."""
    expect(isinstance(probe.make_agent(), Agent), "it is no Agent: it has no method `step`")


@_check
async def check_finishes(probe: AgentProbe) -> None:
    """Every episode ends by itself, completed or truncated, and the agent raised nothing."""
    for run in await probe.run_all():
        _expect_ended(run)


@_check
async def check_records_hold(probe: AgentProbe) -> None:
    """A completed episode has a record; it keeps every invariant, with the mask 1 exactly on the engine's tokens."""
    for run in await probe.run_all():
        has_record = bool(run.result.trajectories) or run.result.status is not Status.COMPLETED
        expect(has_record, "the episode completed without a record: the agent never called begin")
        _expect_sound(run)


@_check
async def check_last_turn_is_the_models(probe: AgentProbe) -> None:
    """Nothing is observed that the model does not answer, whatever the budget."""
    for budget in _budgets(probe):
        run = await probe.run(probe.tasks[0], limits=probe.limits(response_length=budget))
        for trajectory in run.result.trajectories:
            last = trajectory.segments[-1].origin if trajectory.segments else Origin.ACTION
            expect(last != Origin.OBSERVATION, f"with a budget of {budget} the record ends with an observation")


@_check
async def check_budget_is_kept(probe: AgentProbe) -> None:
    """The response keeps the budget, and one that is too small ends the episode in good order and with a reason."""
    for budget in _budgets(probe):
        for task in probe.tasks[:3]:
            run = await probe.run(task, limits=probe.limits(response_length=budget))
            _expect_ended(run)
            _expect_sound(run)
            _expect_reason(run, budget)
            for trajectory in run.result.trajectories:
                num_tokens = trajectory.num_response_tokens
                expect(num_tokens <= budget, f"{num_tokens} response tokens with a budget of {budget}")


@_check
async def check_every_finish_reason_ends_an_episode(probe: AgentProbe) -> None:
    """Whatever reason the engine gives for the end of all turns, the episode ends in good order and says so."""
    for reason in FinishReason:
        for task in probe.tasks[:3]:
            engine = probe.engine()
            await engine.start()
            run = await probe.run(task, engine=_Ending(engine, reason))
            text = f"where all turns end with {reason.value!r}"
            if not reason.is_final:
                expect_equal(run.result.status, Status.ABORTED, f"the status {text}")
                continue
            _expect_ended(run)
            _expect_sound(run)
            if reason.is_cut and run.answers:
                expect_equal(run.result.status, Status.TRUNCATED, f"the status {text}")


@_check
async def check_memory_is_json(probe: AgentProbe) -> None:
    """After every step, `Episode.memory` survives a round trip through JSON."""
    agent = _Watching(probe.make_agent())
    await probe.run_all(agent=agent)
    expect(not agent.problems, "; ".join(agent.problems[:3]))


@_check
async def check_steps_need_only_the_record_and_memory(probe: AgentProbe) -> None:
    """A new agent with the memory out of a checkpoint takes the next step as the old one would have."""
    for task in probe.tasks:
        usual, resumed = await probe.run(task), await probe.run(task, agent=_Forgetful(probe.make_agent))
        _expect_same(resumed, usual, "an episode resumed after every step")


@_check
async def check_is_repeatable(probe: AgentProbe) -> None:
    """The same task and seed give the same record, on the same agent and on a new one."""
    agent = probe.make_agent()
    for task in probe.tasks:
        first = await probe.run(task, agent=agent)
        _expect_same(await probe.run(task, agent=agent), first, "the same task again")
        _expect_same(await probe.run(task), first, "the same task with a new agent")


@_check
async def check_many_at_once_do_not_mix(probe: AgentProbe) -> None:
    """One agent object serves many episodes at once, and each is as it is alone."""
    agent, engine = probe.make_agent(), probe.engine(latency_s=_uneven)
    alone = await probe.run_all(agent=agent)
    await engine.start()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(probe.run(task, agent=agent, engine=engine)) for task in probe.tasks]
    for run, expected in zip([task.result() for task in tasks], alone, strict=True):
        _expect_same(run, expected, "an episode among others")


@_check
async def check_engine_failure_is_the_engines(probe: AgentProbe) -> None:
    """When a generate call fails, the engine owns the episode's failure, and earlier tokens are kept."""
    for number in range(3):
        for task in probe.tasks[:4]:
            engine = probe.engine(failures={number: Failure.ERROR})
            await engine.start()
            run = await probe.run(task, engine=engine)
            if engine.num_calls <= number:
                _expect_ended(run)
                continue
            fault = run.result.fault
            expect_equal(run.result.status, Status.FAILED, f"status when generate call {number} fails")
            expect_equal(fault and fault.owner, "engine", "owner of the fault")
            _expect_sound(run)


@_check
async def check_abort_keeps_what_was_sampled(probe: AgentProbe) -> None:
    """An aborted episode ends soon, as aborted, with the tokens that it had."""
    # An agent in its own process may need seconds for its first request, so the last abort waits for that.
    for abort in (Abort(0.0), Abort(0.05), Abort(0.6, in_turn=True)):
        engine = probe.slow_engine(turn_s=_SLOW_TURN_S)
        await engine.start()
        run = await probe.run(probe.tasks[0], engine=engine, abort=abort)
        expect_equal(run.result.status, Status.ABORTED, f"status when aborted after {abort.after_s} s")
        _expect_sound(run)


@_check
async def check_deadline_keeps_what_was_sampled(probe: AgentProbe) -> None:
    """An episode that is late ends as timed out, with the tokens that it had."""
    engine = probe.slow_engine(turn_s=_SLOW_TURN_S)
    await engine.start()
    run = await probe.run(probe.tasks[0], engine=engine, limits=probe.limits(episode_s=0.5))
    expect_equal(run.result.status, Status.TIMED_OUT, "status of a late episode")
    expect(sum(run.result.metrics.num_tokens.values()) > 0, "the late episode kept no token")
    _expect_sound(run)


@_check
async def check_long_prompt_is_the_datas(probe: AgentProbe) -> None:
    """A prompt that the run does not take fails the episode, owned by the data; the agent does not hide it."""
    run = await probe.run(probe.tasks[0], limits=probe.limits(prompt_length=1))
    expect_equal(run.result.status, Status.FAILED, "status with a prompt that is too long")
    expect_equal(run.result.fault and run.result.fault.owner, "data", "owner of the fault")


@_check
async def check_first_prompt_is_that_of_the_record(probe: AgentProbe) -> None:
    """An agent that tells its first prompt before the episode begins the first record with this prompt."""
    agent = probe.make_agent()
    if not isinstance(agent, PromptingAgent):
        return
    for task in probe.tasks:
        told = agent.first_prompt(task)
        run = await probe.run(task, agent=agent)
        for record in run.result.trajectories[:1]:
            begun = record.input_ids[: record.num_prompt_tokens]
            told_ids = told.token_ids if isinstance(told, MediaTokens) else told
            expect_equal(list(begun), list(told_ids), "prompt of the first record, and the result of `first_prompt`")


@_check
async def check_a_tool_can_end_the_episode(probe: AgentProbe) -> None:
    """After the turn with a result that ends the episode the model is not asked again, and the episode is complete."""
    for task in probe.tasks:
        engine = probe.engine()
        await engine.start()
        ended: list[int] = []
        tools = {name: _EndingTool(tool, engine, ended) for name, tool in probe.resources.tools.items()}
        ending = evolve(probe, resources=evolve(probe.resources, tools=tools))
        run = await ending.run(task, engine=engine)
        _expect_ended(run)
        _expect_sound(run)
        if ended:
            expect_equal(engine.num_calls, ended[0], "requests to the engine, and those before the end by a tool")
            expect_equal(run.result.status, Status.COMPLETED, "status after the end by a tool")


async def run_agent_checks(probe: AgentProbe, names: Iterable[str] = AGENT_CHECKS) -> None:
    """Run checks one after the other; the first that fails raises."""
    for name in names:
        await AGENT_CHECKS[name](probe)


def _budgets(probe: AgentProbe) -> list[int]:
    """Return every small budget and some larger ones."""
    return [*range(1, 40), *range(40, probe.response_length, max(1, probe.response_length // 30))]


def _uneven(request: GenerateRequest) -> float:
    """Return a latency that makes episodes overtake each other."""
    return float(int(request.token_ids.sum()) % 7) / 1000


@frozen
class _EndingTool:
    """A tool whose results end the episode, and the number of requests to the engine at each of them."""

    tool: Tool
    engine: ScriptedEngine
    ended: list[int]

    @property
    def schema(self) -> ToolSchema:
        return self.tool.schema

    async def create(self, task: Task) -> object:
        return await self.tool.create(task)

    async def execute(self, session: object, arguments: Mapping[str, object]) -> ToolResult:
        result = await self.tool.execute(session, arguments)
        self.ended.append(self.engine.num_calls)
        return evolve(result, ends_episode=True)

    async def release(self, session: object) -> float | None:
        return await self.tool.release(session)


@frozen
class _Ending:
    """An engine that gives one reason for the end of each turn."""

    engine: ScriptedEngine
    reason: FinishReason

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await self.engine.generate(request)
        stop = result.stop_reason if self.reason.has_stop else None
        return evolve(result, finish_reason=self.reason, stop_reason=stop)

    async def abort(self, request_id: str) -> None:
        await self.engine.abort(request_id)


def _expect_ended(run: Run) -> None:
    fault = run.result.fault
    text = f"{fault.owner} {fault.kind}: {fault.message}\n{fault.traceback}" if fault else ""
    expect(run.result.status in _ENDED, f"the episode ended as {run.result.status}: {text}")


def _expect_reason(run: Run, budget: int) -> None:
    """Check that a truncated episode names its limit, for people and as data."""
    if run.result.status is Status.TRUNCATED:
        limit = run.result.limit
        expect(limit is not None, f"with a budget of {budget} the episode is truncated and names no limit")
        assert limit is not None
        expect(bool(limit.name and limit.reason), f"with a budget of {budget} the limit has no name or reason: {limit}")


def _expect_sound(run: Run) -> None:
    """Check the record against the invariants and against the engine's results."""
    trajectories, answers = run.result.trajectories, list(run.answers)
    try:
        for trajectory in trajectories:
            check_trajectory(trajectory)
        if len(trajectories) == 1:
            check_sampled(trajectories[0], answers)
    except InvariantError as error:
        raise AssertionError(f"the record is broken: {error}") from error
    recorded: Counter[int] = Counter()
    for trajectory in trajectories:
        recorded.update(trajectory.response_ids[trajectory.response_mask == 1].tolist())
    returned = Counter(np.concatenate([answer.token_ids for answer in answers]).tolist()) if answers else Counter()
    expect_equal(recorded, returned, "tokens with mask 1, against the engine's tokens")


def _expect_same(run: Run, expected: Run, subject: str) -> None:
    expect_equal(run.records, expected.records, f"records of {subject}")
    expect_equal(run.result.status, expected.result.status, f"status of {subject}")
    expect_equal(run.result.messages, expected.result.messages, f"messages of {subject}")
    expect_equal(run.episode.memory, expected.episode.memory, f"memory of {subject}")


@frozen
class _Watching:
    """Steps an agent and notes where its memory is not JSON."""

    agent: Agent
    problems: list[str] = field(factory=list)

    async def step(self, episode: Episode) -> State | str:
        before = str(episode.state)
        state = await self.agent.step(episode)
        try:
            if json.loads(json.dumps(episode.memory, allow_nan=False)) != episode.memory:
                self.problems.append(f"memory changes in JSON after state {before!r}: {episode.memory!r}")
        except (TypeError, ValueError) as error:
            self.problems.append(f"memory is not JSON after state {before!r}: {error}")
        return state


@frozen
class _Forgetful:
    """Takes every step with a new agent and with memory that went through JSON."""

    make_agent: Callable[[], Agent]

    async def step(self, episode: Episode) -> State | str:
        state = await self.make_agent().step(episode)
        episode.memory = json.loads(json.dumps(episode.memory))
        return str(state)
