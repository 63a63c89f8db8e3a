"""Properties of random trees of records, sampled at the same time, dropped, interrupted and resumed."""

import asyncio
import pickle
import tempfile
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import Capabilities, FinishReason, GenerateResult, SamplingParams, State, Status, Task
from turnwise.episode.driver import EpisodeProgram, run_episode
from turnwise.episode.live import LiveEpisode
from turnwise.episode.setup import EpisodeContext, Limits
from turnwise.record.columns import Origin
from turnwise.record.invariants import check_lineage, check_trajectory
from turnwise.record.spec import EpisodeSpec
from turnwise.record.trajectory import Mark
from turnwise_result_files import load_unfinished, save_unfinished

EOS = 2


def next_token(context):
    """Return the token that the model samples after a context, and its log-probability."""
    token = crc32(np.asarray(context, "<i4").tobytes()) % 11
    return token, -(token + 1) / 8


@define(eq=False)
class ContextEngine:
    """Samples a token per tick, by the context alone, and calls `stop` when a number of tokens is sampled."""

    budget: float
    stop: object = None
    aborted: set = field(factory=set)
    capabilities = Capabilities(abort=True)

    async def generate(self, request):
        context, sampled, reason = request.token_ids.tolist(), [], FinishReason.LENGTH
        while len(sampled) < request.sampling.max_tokens:
            await asyncio.sleep(0)
            if self.budget <= 0:
                self.stop()
            if request.request_id in self.aborted:
                reason = FinishReason.ABORT
                break
            if self.budget > 0:
                self.budget -= 1
                sampled.append(next_token([*context, *(token for token, _ in sampled)]))
                if sampled[-1][0] == EOS:
                    reason = FinishReason.STOP
                    break
        ids, logprobs = [token for token, _ in sampled], [logprob for _, logprob in sampled]
        return GenerateResult(token_ids=ids, logprobs=logprobs, finish_reason=reason, weight_version=1)

    async def abort(self, request_id):
        self.aborted.add(request_id)


@define
class TreeAgent:
    """Makes one operation of a list in each step; `a` and `b` choose records, marks and ids."""

    operations: list

    async def step(self, episode):
        memory = episode.memory
        if not memory:
            memory |= {"done": 0, "marks": [], "closed": [], "appended": 0}
        if memory["done"] == len(self.operations):
            return State.TERMINATED
        kind, a, b = self.operations[memory["done"]]
        if kind == "begin" or not memory["marks"]:
            episode.begin([a + 1, b + 1], seed_name=f"{a}")
        else:
            await self.change(episode, kind, a % len(memory["marks"]), b)
        for number, record in enumerate(episode.trajectories):
            if number == len(memory["marks"]):
                memory["marks"].append([])
            if len(record) not in memory["marks"][number]:
                memory["marks"][number].append(len(record))
        memory["done"] += 1
        return "next"

    async def change(self, episode, kind, number, b):
        memory, record = episode.memory, episode.trajectories[number]
        if kind == "branch":
            marks = memory["marks"][number]
            episode.branch(record, Mark(marks[b % len(marks)]), seed_name="" if b % 2 else f"b{b}")
        elif kind == "describe":
            episode.describe_record(record, kind="subagent", label=f"{b}", trained=b % 2 == 0)
        elif number in memory["closed"]:
            return
        elif kind == "close":
            episode.close_record(record)
            memory["closed"].append(number)
        elif kind == "observe":
            episode.observe([b + 3], record=record)
        else:
            await self.sample(episode, kind, number, b)

    async def sample(self, episode, kind, number, b):
        memory, records = episode.memory, episode.trajectories
        if kind == "drop":
            await episode.sample(record=records[number], max_tokens=4)
        elif kind == "keep":
            result = await episode.sample(record=records[number], max_tokens=4)
            episode.append(result, record=records[number])
            memory["appended"] += len(result.token_ids)
        elif kind == "cancel":
            async with asyncio.TaskGroup() as group:
                task = group.create_task(episode.sample(record=records[number], max_tokens=4))
                await asyncio.sleep(0)
                task.cancel()
        else:
            chosen = {number, b % len(records)} - set(memory["closed"])
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(episode.generate(record=records[n], max_tokens=6)) for n in sorted(chosen)]
            memory["appended"] += sum(len(task.result().token_ids) for task in tasks)


def run_part(spec, operations, budget):
    """Run an episode until it ends or has sampled `budget` tokens; return the result and its notes."""

    async def main():
        engine = ContextEngine(budget)
        async with asyncio.TaskGroup() as background:
            context = EpisodeContext(engine=engine, spawn=background.create_task)
            episode = LiveEpisode(spec, Limits(response_length=4096), context)
            engine.stop = episode.abort
            return await run_episode(episode, EpisodeProgram(agent=TreeAgent(operations))), episode.memory

    return asyncio.run(main())


def run_tree(operations, budgets=(), send=None):
    """Run an episode with an interrupt after each budget; return the result and its notes."""
    task = Task(messages=({"role": "user", "content": "hi"},), uid="t")
    spec = EpisodeSpec(task=task, agent_name="tree", sampling=SamplingParams(stop_token_ids=(EOS,)))
    for budget in (*budgets, float("inf")):
        result, memory = run_part(spec, operations, budget)
        assert result.fault is None or result.status is Status.ABORTED, result.fault
        check_all(result)
        if result.status is not Status.ABORTED:
            return result, memory
        spec = send(result.unfinished).resumed_spec
    raise AssertionError("an episode without an interrupt was aborted")


def check_all(result):
    """Check the records: every sampled token is the model's in its context, and is trained in one record alone."""
    check_lineage(result.trajectories, result.lineage)
    for number, record in enumerate(result.trajectories):
        check_trajectory(record)
        ids, first = record.input_ids.tolist(), record.num_prompt_tokens
        for index, origin in enumerate(record.origins.tolist()):
            if origin in (Origin.ACTION, Origin.REPLAYED):
                expected = next_token(ids[: first + index])
                assert (ids[first + index], record.logprobs[index]) == expected
            if origin == Origin.REPLAYED:
                owner = number
                while result.trajectories[owner].origins[index] == Origin.REPLAYED:
                    owner = result.lineage[owner].parent
                assert result.trajectories[owner].origins[index] == Origin.ACTION


def send_by_ray(unfinished):
    return pickle.loads(pickle.dumps(unfinished))


def send_by_file(unfinished):
    with tempfile.TemporaryDirectory() as folder:
        save_unfinished(Path(folder) / "unfinished.jsonl", [unfinished])
        return load_unfinished(Path(folder) / "unfinished.jsonl")[0]


def content(result):
    """Return everything of the records that does not depend on the order in which turns ended."""
    records = [{k: np.asarray(v).tolist() for k, v in t.to_dict().items()} for t in result.trajectories]
    return records, result.lineage, result.metrics.num_tokens, result.metrics.num_turns


kinds = st.sampled_from(["begin", "branch", "turns", "turns", "keep", "drop", "cancel", "observe", "describe", "close"])
trees = st.lists(st.tuples(kinds, st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=14)


@given(trees)
def test_each_sampled_token_is_trained_once(operations):
    """The invariants hold on every record of a tree, and the actions of all records are the appended tokens."""
    result, memory = run_tree(operations)

    assert memory["appended"] == sum(int(record.response_mask.sum()) for record in result.trajectories)
    assert result.metrics.num_tokens["action"] == memory["appended"]
    assert (result.lineage == ()) == all(kind not in ("branch", "describe") for kind, *_ in actual(operations))


def actual(operations):
    """Return the operations that are made as they say: the first one always begins a record."""
    return [("begin", 0, 0), *operations[1:]]


@pytest.mark.parametrize("send", [send_by_ray, send_by_file])
@settings(max_examples=60, deadline=None)
@given(trees, st.lists(st.integers(0, 12), min_size=1, max_size=4))
def test_an_interrupt_changes_no_record(send, operations, budgets):
    """An episode that is interrupted at any tokens has the records of an uninterrupted one."""
    expected, _ = run_tree(operations)
    result, _ = run_tree(operations, budgets, send)

    assert content(result) == content(expected)
