"""Episodes that are cut and go on later: what comes out is what would have come out without the cut."""

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
    SamplingParams,
    State,
    Status,
    Task,
    ToolCall,
    ToolResult,
)
from turnwise.driver import Recipe, run_episode
from turnwise.episode import LiveEpisode
from turnwise.episode_setup import Limits, Services
from turnwise.episode_spec import EpisodeSpec
from turnwise.function_tool import function_tool
from turnwise.invariants import check_trajectory
from turnwise.tools import ToolBox
from turnwise.unfinished_file import load_unfinished, save_unfinished

STOP = 3
"""Ends a turn; the chain below comes to it now and then."""


def next_token(context):
    """The next id of a model that depends on the context alone, so that a cut turn goes on as it would have."""
    return int((context[-1] * 31 + len(context) * 17 + len(context) // 3) % 41)


@define
class ChainEngine:
    """Samples `next_token`; after `budget` tokens in all it calls `on_cut` and ends requests with `abort`."""

    budget: float = float("inf")
    on_cut: object = None
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
                self.on_cut()
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
        """Nothing is in flight for longer than a tick."""


class User:
    """Answers with the number of messages."""

    async def create(self, task):
        return []

    async def respond(self, session, messages):
        return Reply(content=str(len(messages)), reward=0.5)

    async def release(self, session):
        """Nothing."""


class TurnByTurn:
    """One await a step: generate, tool, user, and again; keeps notes and writes messages as it goes."""

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
    """The same in a single step, with a second record and a block of paths that each take two turns and a tool."""

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
        """Take two turns."""
        episode.force(np.array([10 + path.index]), record=path)
        await episode.generate(record=path, max_tokens=4 + path.index)
        answer = await episode.call_tool(ToolCall(name="look", arguments={"at": path.index}))
        episode.observe(np.array([len(answer.text)]), record=path)
        await episode.generate(record=path, max_tokens=3)


class ForkOverSteps:
    """Forks in one step, walks in two more and joins in another, so that a cut finds the block open."""

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
    """An engine, a tool and a user around one episode at a time; counts what is run."""

    calls: Counter = field(factory=Counter)
    hang_at: int = -1
    num_calls: int = 0
    engine: ChainEngine = field(factory=ChainEngine)
    episode: LiveEpisode | None = None

    async def look(self, at: int) -> str:
        """Answer with a text of some length, or, at the chosen call, be aborted while it waits."""
        self.num_calls += 1
        if self.num_calls == self.hang_at:
            self.episode.abort()
            await asyncio.sleep(60)
        self.calls[at] += 1
        return "x" * (at + 1)

    def run(self, spec, *, budget=float("inf"), hang_at=-1, version=0):
        """Run an episode, or what is left of it, up to a cut."""
        self.engine.budget, self.engine.version, self.num_calls, self.hang_at = budget, version, 0, hang_at
        return asyncio.run(self._run(spec))

    async def _run(self, spec):
        recipe = Recipe(agent=AGENTS[spec.agent_name], tools=ToolBox([function_tool(self.look)]), reward=Sum())
        async with asyncio.TaskGroup() as group:
            services = Services(engine=self.engine, spawn=group.create_task, interaction=User())
            self.episode = LiveEpisode(spec, Limits(response_length=300), services)
            self.engine.on_cut = self.episode.abort
            return await run_episode(self.episode, recipe)


class Sum:
    """A score that depends on every sampled id."""

    def score(self, episode):
        """Score each record."""
        return [float(trajectory.response_ids.sum() % 97) for trajectory in episode.trajectories]


def spec_of(agent):
    sampling = SamplingParams(stop_token_ids=(STOP,))
    return EpisodeSpec(
        task=Task(messages=({"role": "user", "content": "x"},), uid="abc"), agent_name=agent, sampling=sampling
    )


def content(result):
    """All of a result that does not depend on time or weights."""
    records = [{k: np.asarray(v).tolist() for k, v in t.to_dict().items()} for t in result.trajectories]
    for record in records:
        del record["weight_versions"]
    metrics = evolve(result.metrics, total_s=0, llm_s=0, tool_s=0, reward_s=0)
    return records, result.status, result.scores, result.messages, metrics


def whole(agent):
    """What an episode gives that nobody cuts, and how many tokens it samples and tools it calls."""
    world = World()
    result = world.run(spec_of(agent))
    assert result.status in (Status.COMPLETED, Status.TRUNCATED), result.fault
    return result, sum(result.metrics.num_tokens[name] for name in ("action",)), world


def carried_by_ray(unfinished):
    """Return what arrives when it travels between processes."""
    return pickle.loads(pickle.dumps(unfinished))


def carried_by_a_file(unfinished):
    """Return what another process reads."""
    with tempfile.TemporaryDirectory() as folder:
        save_unfinished(Path(folder) / "unfinished.jsonl", [unfinished])
        return load_unfinished(Path(folder) / "unfinished.jsonl")[0]


def cut_and_finish(agent, budgets, *, hang_at=-1, carry=carried_by_ray):
    """Cut an episode several times, going on from a copy that travelled each time, and return its end."""
    world, spec, result = World(), spec_of(agent), None
    for version, budget in enumerate([*budgets, float("inf")]):
        result = world.run(spec, budget=budget, hang_at=hang_at if version == 0 else -1, version=version)
        if result.status is not Status.ABORTED:
            break
        for trajectory in result.trajectories:
            check_trajectory(trajectory)
        spec = carry(result.unfinished).resumed_spec
    return result, world


@pytest.mark.parametrize("agent", AGENTS)
def test_a_cut_at_any_token_changes_nothing(agent):
    """
    Whatever token an episode is cut at, in a turn, between turns or in a path, it ends as if it had not been.
    """
    expected, num_tokens, undisturbed = whole(agent)
    assert num_tokens > 15
    for budget in range(num_tokens):
        result, world = cut_and_finish(agent, [budget])

        assert content(expected) == content(result)
        assert world.calls == undisturbed.calls, "a tool call that was answered ran again"


@pytest.mark.parametrize("agent", ["turn_by_turn", "all_at_once"])
def test_a_cut_in_any_tool_call_changes_nothing(agent):
    """
    A call that was cut runs again; those beside it that were answered do not.
    """
    expected, _, undisturbed = whole(agent)
    for hang_at in range(1, undisturbed.num_calls + 1):
        result, world = cut_and_finish(agent, [float("inf")], hang_at=hang_at)

        assert content(expected) == content(result)
        assert world.calls == undisturbed.calls


@given(
    agent=st.sampled_from(sorted(AGENTS)),
    budgets=st.lists(st.integers(0, 25), max_size=6),
    carry=st.sampled_from([carried_by_ray, carried_by_a_file]),
)
@settings(max_examples=60, deadline=None)
def test_many_cuts_change_nothing_but_the_weights(agent, budgets, carry):
    """
    However often an episode is cut, each token has the version of the part that sampled it, and versions only rise.
    """
    expected, _, _ = whole(agent)
    result, world = cut_and_finish(agent, budgets, carry=carry)

    assert content(expected) == content(result)
    for trajectory in result.trajectories:
        check_trajectory(trajectory)
        if not trajectory.has_blocks:
            assert (np.diff(trajectory.weight_versions[trajectory.response_mask == 1]) >= 0).all()
    # A request that had sampled nothing is asked again with its own seed; no other seed comes twice.
    assert len(set(world.engine.seeds)) >= len(world.engine.seeds) - len(budgets) * 4


class Diary:
    """A tool whose session holds what was written, and a simulated user that counts; both can be suspended."""

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


def with_diaries(spec, budget):
    """Run an episode with a tool and a user that can be suspended, up to a cut."""
    engine, tool, user = ChainEngine(budget), Diary(), Diary()

    async def run():
        recipe = Recipe(agent=AGENTS["turn_by_turn"], tools=ToolBox([tool]))
        async with asyncio.TaskGroup() as group:
            services = Services(engine=engine, spawn=group.create_task, interaction=user)
            episode = LiveEpisode(spec, Limits(response_length=300), services)
            engine.on_cut = episode.abort
            return await run_episode(episode, recipe)

    return asyncio.run(run()), tool, user


def test_sessions_that_can_be_suspended_go_on():
    """
    A session is suspended in place of being released, and its rewards count once.
    """
    expected, tool, user = with_diaries(spec_of("turn_by_turn"), float("inf"))
    pages = tool.released, user.released
    for budget in range(0, 20, 3):
        cut, tool, user = with_diaries(spec_of("turn_by_turn"), budget)
        assert cut.status is Status.ABORTED
        assert (tool.released, user.released) == ([], [])
        result, tool, user = with_diaries(carried_by_a_file(cut.unfinished).resumed_spec, float("inf"))

        assert content(expected) == content(result)
        assert (tool.released, user.released) == pages


def test_steps_and_cuts_are_counted_over_all_parts():
    """
    `max_steps` bounds all parts together, and the time spent adds up.
    """
    world = World()
    first = world.run(spec_of("turn_by_turn"), budget=12)
    left = first.unfinished
    second = world.run(left.resumed_spec, budget=1)

    assert left.num_steps < second.unfinished.num_steps or left.state == second.unfinished.state
    assert (left.num_cuts, second.unfinished.num_cuts) == (1, 2)
    assert second.unfinished.spent_s > left.spent_s > 0
    assert second.unfinished.num_kept_tokens == 13
    assert second.metrics.total_s >= second.unfinished.spent_s > left.spent_s


def test_notes_that_are_no_json_cannot_travel_in_a_file(tmp_path):
    """
    Such an episode is logged and begins anew; the others are kept.
    """
    world = World()
    left = world.run(spec_of("turn_by_turn"), budget=12).unfinished
    odd = evolve(left, memory={"object": object()})
    with structlog.testing.capture_logs() as lines:
        save_unfinished(tmp_path / "u.jsonl", [odd, left])
    one, other = load_unfinished(tmp_path / "u.jsonl")

    assert [line["event"] for line in lines] == ["episode cannot be kept: its notes are no JSON"]
    assert (one.began, other.began) == (False, True)
    assert one.resumed_spec.unfinished is None
