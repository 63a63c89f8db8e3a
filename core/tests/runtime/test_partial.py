"""Interrupted episodes that resume later: their results equal the results without the interrupt."""

import asyncio
import pickle
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import structlog
from attrs import define, evolve, field
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import (
    Capabilities,
    FinishReason,
    GenerateResult,
    Reply,
    Report,
    SamplingParams,
    State,
    Status,
    Task,
    ToolCall,
    ToolResult,
)
from turnwise.episode.driver import EpisodeProgram, run_episode
from turnwise.episode.live import LiveEpisode
from turnwise.episode.setup import EpisodeContext, Limits
from turnwise.record.invariants import check_trajectory
from turnwise.record.spec import EpisodeSpec
from turnwise.tools.toolbox import ToolBox
from turnwise_result_files import load_unfinished, save_unfinished

STOP = 3
"""Ends a turn; `next_token` returns it now and then."""


def next_token(context):
    """Return the next id, which depends on the context alone, so that the rest of an interrupted turn is the same."""
    return int((context[-1] * 31 + len(context) * 17 + len(context) // 3) % 41)


@define
class ChainEngine:
    """Samples `next_token`; after `budget` tokens it calls `on_interrupt` and ends requests with `abort`."""

    budget: float = float("inf")
    on_interrupt: object = None
    version: int = 0
    seeds: list = field(factory=list)
    capabilities = Capabilities(abort=True)

    async def generate(self, request):
        self.seeds.append(request.sampling.seed)
        context, start = request.token_ids.tolist(), len(request.token_ids)
        reason = FinishReason.LENGTH
        await asyncio.sleep(0)
        while len(context) - start < request.sampling.max_tokens:
            if self.budget <= 0:
                self.on_interrupt()
                reason = FinishReason.ABORT
                break
            self.budget -= 1
            context.append(next_token(context))
            if context[-1] in request.sampling.stop_token_ids:
                reason = FinishReason.STOP
                break
        ids = context[start:]
        logprobs = [-(1 + (start + i) % 7) / 8 for i in range(len(ids))]
        stop = ids[-1] if reason is FinishReason.STOP else None
        return GenerateResult(
            token_ids=ids, logprobs=logprobs, finish_reason=reason, weight_version=self.version, stop_reason=stop
        )

    async def abort(self, request_id):
        """Do nothing: a request never waits."""


class User:
    """A simulated user that replies with the number of messages."""

    async def create(self, task):
        return []

    async def respond(self, session, messages):
        return Reply(content=str(len(messages)), reward=0.5)

    async def release(self, session):
        pass


class TurnByTurn:
    """An agent with one wait a step (generate, tools, user); it writes notes and messages."""

    async def step(self, episode):
        memory = episode.memory
        if episode.state == State.PENDING:
            episode.begin(np.frombuffer(episode.task.uid.encode(), np.uint8))
            memory.update(turns=0, log=[])
            return State.GENERATING
        if episode.state == State.GENERATING:
            memory["turns"] += 1
            result = await episode.generate(max_tokens=9)
            memory["log"].append(int(result.token_ids.sum()))
            episode.messages.append({"role": "assistant", "content": str(len(result.token_ids))})
            return State.PROCESSING_TOOLS
        if episode.state == State.PROCESSING_TOOLS:
            memory["log"].append("tools")
            async with asyncio.TaskGroup() as group:
                calls = [
                    group.create_task(episode.call_tool(ToolCall(name="look", arguments={"at": i}))) for i in range(3)
                ]
            texts = [call.result().text for call in calls]
            episode.observe(np.array([5 + len(text) for text in texts]))
            memory["log"].append(texts)
            return State.INTERACTING
        reply = await episode.interact()
        episode.record_metric("user", reply.reward)
        episode.messages.append({"role": "user", "content": reply.content})
        episode.observe(np.array([int(reply.content)]))
        return State.TERMINATED if memory["turns"] == 3 else State.GENERATING


class AllAtOnce:
    """An agent with a single step, a second record, and a block whose paths take two turns and call a tool."""

    async def step(self, episode):
        uid = np.frombuffer(episode.task.uid.encode(), np.uint8)
        episode.begin(uid)
        await episode.generate(max_tokens=7)
        paths = episode.trajectory.fork(3)
        async with asyncio.TaskGroup() as group:
            for path in paths:
                group.create_task(self.walk(episode, path))
        episode.trajectory.join(paths)
        await episode.generate(max_tokens=5)
        episode.begin(uid[::-1])
        result = await episode.generate(max_tokens=8)
        episode.memory["last"] = result.token_ids.tolist()
        return State.TERMINATED

    async def walk(self, episode, path):
        """Take two turns on a path."""
        episode.force(np.array([10 + path.index]), record=path)
        await episode.generate(record=path, max_tokens=4 + path.index)
        answer = await episode.call_tool(ToolCall(name="look", arguments={"at": path.index}))
        episode.observe(np.array([len(answer.text)]), record=path)
        await episode.generate(record=path, max_tokens=3)


class ForkOverSteps:
    """Forks in one step, generates in two more and joins in another, so that an interrupt finds the block open."""

    async def step(self, episode):
        match episode.state:
            case State.PENDING:
                episode.begin(np.array([7, 8, 9]))
                return State.GENERATING
            case State.GENERATING:
                await episode.generate(max_tokens=6)
                for path in episode.trajectory.fork(2):
                    episode.force(np.array([11 + path.index]), record=path)
                return "first"
            case "first" | "second":
                async with asyncio.TaskGroup() as group:
                    for path in episode.trajectory.open_paths:
                        group.create_task(episode.generate(record=path, max_tokens=5))
                return "second" if episode.state == "first" else "join"
        episode.trajectory.join(episode.trajectory.open_paths)
        await episode.generate(max_tokens=6)
        return State.TERMINATED


AGENTS = {"turn_by_turn": TurnByTurn(), "all_at_once": AllAtOnce(), "fork_over_steps": ForkOverSteps()}


@define
class World:
    """The tool `look`, with an engine and a user around one episode at a time; counts the finished tool calls."""

    schema = {  # noqa: RUF012 - attrs keeps it on the class
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}}},
    }

    calls: Counter = field(factory=Counter)
    hang_at: int = -1
    num_calls: int = 0
    engine: ChainEngine = field(factory=ChainEngine)
    episode: LiveEpisode | None = None

    async def create(self, task): ...

    async def execute(self, _session, arguments):
        """Return a text whose length depends on `at`; at the chosen call, abort the episode and wait."""
        at = arguments["at"]
        self.num_calls += 1
        if self.num_calls == self.hang_at:
            self.episode.abort()
            await asyncio.sleep(60)
        self.calls[at] += 1
        return ToolResult(text="x" * (at + 1), report=Report(title=f"call {at}", facts={"length": at + 1}))

    async def release(self, _session): ...

    def run(self, spec, *, budget=float("inf"), hang_at=-1, version=0):
        """Run an episode, or the rest of it, up to an interrupt."""
        self.engine.budget, self.engine.version, self.num_calls, self.hang_at = budget, version, 0, hang_at
        return asyncio.run(self._run(spec))

    async def _run(self, spec):
        program = EpisodeProgram(agent=AGENTS[spec.agent_name], tools=ToolBox([self]), reward=Sum())
        async with asyncio.TaskGroup() as group:
            context = EpisodeContext(engine=self.engine, spawn=group.create_task, interaction=User())
            self.episode = LiveEpisode(spec, Limits(response_length=300, abort_grace_s=0.2), context)
            self.engine.on_interrupt = self.episode.abort
            return await run_episode(self.episode, program)


class Sum:
    """A score that depends on every sampled id."""

    def score(self, episode):
        """Score each record."""
        return [float(trajectory.response_ids.sum() % 97) for trajectory in episode.trajectories]


def make_spec(agent):
    sampling = SamplingParams(stop_token_ids=(STOP,))
    return EpisodeSpec(
        task=Task(messages=({"role": "user", "content": "x"},), uid="abc"), agent_name=agent, sampling=sampling
    )


def content(result):
    """Return the parts of a result that depend neither on time nor on weights."""
    records = [{k: np.asarray(v).tolist() for k, v in t.to_dict().items()} for t in result.trajectories]
    for record in records:
        del record["weight_versions"]
    metrics = evolve(result.metrics, total_s=0, llm_s=0, tool_s=0, reward_s=0)
    reports = [evolve(report, num_turns=0) for report in result.reports]  # paths sample turns at the same time
    return records, result.status, result.scores, result.messages, metrics, reports


def run_uninterrupted(agent):
    """Run an episode without interrupts; return its result, its number of sampled tokens and its world."""
    world = World()
    result = world.run(make_spec(agent))
    assert result.status in (Status.COMPLETED, Status.TRUNCATED), result.fault
    return result, result.metrics.num_tokens["action"], world


def count_sampled(unfinished):
    """Return the number of sampled tokens that an unfinished episode keeps, in its records and its last step."""
    in_records = sum(len(trajectory.sampled()[0]) for trajectory in unfinished.trajectories)
    return in_records + sum(len(turn.result.token_ids) for turn in unfinished.turns)


def send_by_ray(unfinished):
    """Return the episode as another process receives it."""
    return pickle.loads(pickle.dumps(unfinished))


def send_by_file(unfinished):
    """Return the episode as another process reads it from a file."""
    with tempfile.TemporaryDirectory() as folder:
        save_unfinished(Path(folder) / "unfinished.jsonl", [unfinished])
        return load_unfinished(Path(folder) / "unfinished.jsonl")[0]


def interrupt_and_finish(agent, budgets, *, hang_at=-1, send=send_by_ray):
    """Interrupt an episode several times, resume each time from a sent copy, and return its result and world."""
    world, spec, result = World(), make_spec(agent), None
    for version, budget in enumerate([*budgets, float("inf")]):
        result = world.run(spec, budget=budget, hang_at=hang_at if version == 0 else -1, version=version)
        if result.status is not Status.ABORTED:
            break
        for trajectory in result.trajectories:
            check_trajectory(trajectory)
        spec = send(result.unfinished).resumed_spec
    return result, world


@pytest.mark.parametrize("agent", AGENTS)
def test_an_interrupt_at_any_token_changes_nothing(agent):
    """
    An interrupt in a turn, between turns or in a path leaves the result of the episode as it is.
    """
    expected, num_tokens, undisturbed = run_uninterrupted(agent)
    assert num_tokens > 15
    for budget in range(num_tokens):
        result, world = interrupt_and_finish(agent, [budget])

        assert content(expected) == content(result)
        assert world.calls == undisturbed.calls, "a finished tool call ran again"


@pytest.mark.parametrize("agent", ["turn_by_turn", "all_at_once"])
def test_an_interrupt_in_any_tool_call_changes_nothing(agent):
    """An interrupted call runs again, and finished calls beside it do not."""
    expected, _, undisturbed = run_uninterrupted(agent)
    for hang_at in range(1, undisturbed.num_calls + 1):
        result, world = interrupt_and_finish(agent, [float("inf")], hang_at=hang_at)

        assert content(expected) == content(result)
        assert world.calls == undisturbed.calls


@given(
    agent=st.sampled_from(sorted(AGENTS)),
    budgets=st.lists(st.integers(0, 25), max_size=6),
    send=st.sampled_from([send_by_ray, send_by_file]),
)
@settings(max_examples=60, deadline=None)
def test_many_interrupts_change_only_the_weight_versions(agent, budgets, send):
    """
    Each token has the weight version of the part that sampled it, so versions only rise.
    """
    expected, _, _ = run_uninterrupted(agent)
    result, world = interrupt_and_finish(agent, budgets, send=send)

    assert content(expected) == content(result)
    for trajectory in result.trajectories:
        check_trajectory(trajectory)
        if not trajectory.has_blocks:
            assert (np.diff(trajectory.weight_versions[trajectory.response_mask == 1]) >= 0).all()
    # A request without a sampled token is repeated with its own seed; no other seed is used twice.
    assert len(set(world.engine.seeds)) >= len(world.engine.seeds) - len(budgets) * 4


class Diary:
    """A tool and a simulated user whose session is a list; it can be suspended."""

    def __init__(self):
        parameters = {"type": "object", "properties": {"at": {"type": "integer"}}}
        self.schema = {"type": "function", "function": {"name": "look", "parameters": parameters}}
        self.released = []

    async def create(self, task):
        return []

    async def suspend(self, session):
        return {"pages": list(session)}

    async def restore(self, task, notes):
        return list(notes["pages"])

    async def release(self, session):
        self.released.append(list(session))
        return float(len(session))

    async def execute(self, session, arguments):
        session.append(arguments["at"])
        return ToolResult(text=str(len(session)), reward=0.25)

    async def respond(self, session, messages):
        session.append(len(messages))
        return Reply(content=str(len(session)), reward=0.5)


def run_with_diaries(spec, budget):
    """Run an episode with a tool and a user that can be suspended, up to an interrupt."""
    engine, tool, user = ChainEngine(budget), Diary(), Diary()

    async def run():
        program = EpisodeProgram(agent=AGENTS["turn_by_turn"], tools=ToolBox([tool]))
        async with asyncio.TaskGroup() as group:
            context = EpisodeContext(engine=engine, spawn=group.create_task, interaction=user)
            episode = LiveEpisode(spec, Limits(response_length=300, abort_grace_s=0.2), context)
            engine.on_interrupt = episode.abort
            return await run_episode(episode, program)

    return asyncio.run(run()), tool, user


def test_sessions_that_can_be_suspended_are_restored():
    """A session is suspended instead of released, and its rewards count once."""
    expected, tool, user = run_with_diaries(make_spec("turn_by_turn"), float("inf"))
    pages = tool.released, user.released
    for budget in range(0, 20, 3):
        interrupted, tool, user = run_with_diaries(make_spec("turn_by_turn"), budget)
        assert interrupted.status is Status.ABORTED
        assert (tool.released, user.released) == ([], [])
        result, tool, user = run_with_diaries(send_by_file(interrupted.unfinished).resumed_spec, float("inf"))

        assert content(expected) == content(result)
        assert (tool.released, user.released) == pages


def test_steps_and_interrupts_count_all_parts():
    """Steps, interrupts and seconds of all parts add up."""
    world = World()
    first = world.run(make_spec("turn_by_turn"), budget=12)
    left = first.unfinished
    second = world.run(left.resumed_spec, budget=1)

    assert left.num_steps < second.unfinished.num_steps or left.state == second.unfinished.state
    assert (left.num_interruptions, second.unfinished.num_interruptions) == (1, 2)
    assert second.unfinished.spent_s > left.spent_s > 0
    assert count_sampled(second.unfinished) == 13
    assert second.metrics.total_s >= second.unfinished.spent_s > left.spent_s


def test_an_episode_whose_notes_are_not_json_restarts(tmp_path):
    """It is logged and written as not started, and other episodes of the file are kept."""
    world = World()
    left = world.run(make_spec("turn_by_turn"), budget=12).unfinished
    odd = evolve(left, memory={"object": object()})
    with structlog.testing.capture_logs() as lines:
        save_unfinished(tmp_path / "u.jsonl", [odd, left])
    one, other = load_unfinished(tmp_path / "u.jsonl")

    assert [line["event"] for line in lines] == ["episode restarts from its prompt: its notes are not JSON values"]
    assert (one.started, other.started) == (False, True)
    assert one.resumed_spec.unfinished is None
