"""Calls that end before their last episode, and calls that go on with what an earlier one left."""

import asyncio
import threading
from collections import Counter

import numpy as np
import pytest
from attrs import evolve

from turnwise import SamplingParams, State, Status, Task
from turnwise.driver import Recipe
from turnwise.episode_setup import Limits
from turnwise.errors import DataError
from turnwise.invariants import check_trajectory
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.worker import WorkerParts
from turnwise.testing.scripted import RandomPolicy, ScriptedEngine
from turnwise.unfinished_file import load_unfinished, save_unfinished


class TwoTurns:
    """Two turns with an observation between them."""

    async def step(self, episode):
        """Make one transition."""
        if episode.state == State.PENDING:
            episode.begin(np.frombuffer(episode.task.uid.encode(), np.uint8))
            return State.GENERATING
        await episode.generate()
        if len(episode.trajectory.turns()) == 2:
            return State.TERMINATED
        episode.observe(np.array([1, 2]))
        return State.GENERATING


def slow(request):
    """Seconds for each token: the episodes of tasks that are called so take for ever."""
    return 0.5 if request.group_id.startswith("slow") else 0.0


class SpeedUp:
    """An engine's pace that a test can change between two calls."""

    factor = 1.0

    def __call__(self, request, _index):
        return self.factor * slow(request)


def manager(pace=None, *, num_workers=1, **plan):
    pace = pace or SpeedUp()
    engine = ScriptedEngine(policy=RandomPolicy(seed=1, end_token_id=255, mean_tokens=12), token_latency_s=pace)
    parts = WorkerParts(
        engine=engine,
        recipes={"two": Recipe(agent=TwoTurns())},
        limits=Limits(response_length=200),
        stop_token_ids=(255,),
    )
    plan.setdefault("sampling", SamplingParams(max_tokens=40))
    made = RolloutPlan(default_agent="two", agent_names=frozenset({"two"}), **plan)
    return RolloutManager(LocalRuntime(engine, parts, num_workers), made)


def tasks(*uids):
    return [Task(messages=({"role": "user", "content": "x"},), uid=uid, sample_index=i) for i, uid in enumerate(uids)]


MIXED = tasks("a", "slow1", "b", "c", "d", "slow2", "e", "f", "g", "h")


@pytest.mark.parametrize("num_workers", [1, 3])
def test_enough_episodes_end_a_call(num_workers):
    """
    With 0.8 of 10 episodes finished the two slow ones are cut; they are kept, and in no batch.
    """
    with manager(num_workers=num_workers) as running:
        results = running.rollout(MIXED, min_fraction=0.8)

        assert [r.task.uid for r in results] == list("abcdefgh")
        assert {u.uid for u in running.unfinished} == {"slow1/0", "slow2/0"}
        assert {r.status for r in results} <= {Status.COMPLETED, Status.TRUNCATED}


def test_they_go_on_in_the_next_call_under_new_weights():
    """
    Tokens sampled before the cut keep their version and log-probabilities; those after it have the new one.
    """
    pace = SpeedUp()
    with manager(pace) as running:
        running.rollout(MIXED, min_fraction=0.8, grace_s=1.2)
        kept = {u.uid: u for u in running.unfinished}
        running.update_weights([], version=7)
        pace.factor = 0.0
        results = running.rollout(tasks("new"), resume=True)

        assert running.unfinished == ()
    assert [r.task.uid for r in results] == ["slow1", "slow2", "new"]
    for result in results[:2]:
        trajectory, before = result.trajectories[0], kept[result.uid].turns[0].result
        check_trajectory(trajectory)
        assert trajectory.response_ids[: len(before.token_ids)].tolist() == before.token_ids.tolist()
        assert trajectory.logprobs[: len(before.token_ids)].tolist() == before.logprobs.tolist()
        versions = trajectory.weight_versions[trajectory.response_mask == 1]
        assert len(before.token_ids) == (versions == 0).sum() > 0
        assert set(versions.tolist()) == {0, 7}


def test_the_grace_lets_stragglers_finish():
    """
    Who finishes within the grace is in the batch, and a call that is complete does not wait for the grace to end.
    """
    pace = SpeedUp()
    pace.factor = 0.01
    with manager(pace) as running:
        results = running.rollout(MIXED, min_fraction=0.8, grace_s=3600)

        assert len(results) == 10
        assert running.unfinished == ()


def test_every_task_comes_back_once_over_many_calls():
    """
    However often calls are cut, each episode is finished in exactly one of them.
    """
    pace, done = SpeedUp(), Counter()
    with manager(pace, n=2) as running:
        for step in range(4):
            pace.factor = 0.0 if step == 3 else 1.0
            fresh = tasks(f"slow{step}", f"x{step}", f"y{step}")
            results = (
                running.rollout(fresh, global_step=step, min_fraction=0.4, resume=True)
                if step < 3
                else running.rollout([], resume=True)
            )
            done.update(r.uid for r in results)
            for result in results:
                check_trajectory(result.trajectories[0])

    assert (
        Counter({f"{name}{step}/{n}": 1 for name in ("slow", "x", "y") for step in range(3) for n in range(2)}) == done
    )


def test_groups_stand_together():
    """
    Resumed episodes come first, and episodes of one group are neighbours.
    """
    pace = SpeedUp()
    with manager(pace, n=3) as running:
        running.rollout(tasks("slow1", "a", "slow2"), min_fraction=0.3)
        unfinished = running.unfinished
        pace.factor = 0.0
        results = running.rollout(tasks("b", "slow1"), resume=[unfinished[0], unfinished[4], unfinished[1]])

        assert len(running.unfinished) == len(unfinished) - 3
    names = [r.task.uid for r in results]
    assert [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name] == list(dict.fromkeys(names))


def test_an_abort_keeps_what_there_was():
    """
    After an abort the episodes are among the results, as aborted, and can be resumed.
    """
    pace = SpeedUp()
    with manager(pace) as running:
        threading.Timer(0.8, running.abort).start()
        aborted = [r for r in running.rollout(MIXED) if r.status is Status.ABORTED]
        pace.factor = 0.0
        resumed = running.rollout([], resume=True)

    assert {r.task.uid for r in aborted} == {"slow1", "slow2"} == {r.task.uid for r in resumed}
    for before, after in zip(sorted(aborted, key=lambda r: r.uid), sorted(resumed, key=lambda r: r.uid), strict=True):
        had = before.trajectories[0].input_ids.tolist()
        assert after.trajectories[0].input_ids[: len(had)].tolist() == had


def test_another_process_goes_on_from_a_file(tmp_path):
    """
    What one manager left another one finishes, from a file; those that never began are begun.
    """
    with manager() as running:
        running.rollout(MIXED, min_fraction=0.7)
        left = running.unfinished
        save_unfinished(tmp_path / "unfinished.jsonl", left)
    pace = SpeedUp()
    pace.factor = 0.0
    with manager(pace) as running:
        results = running.rollout([], resume=load_unfinished(tmp_path / "unfinished.jsonl"))

    assert {r.uid for r in results} == {u.uid for u in left}
    assert {r.status for r in results} <= {Status.COMPLETED, Status.TRUNCATED}


def test_a_stream_can_be_cut_too():
    """
    The iterator ends when enough have finished.
    """

    async def collect(running):
        return [result async for result in running.stream(MIXED, min_fraction=0.8)]

    with manager() as running:
        assert len(asyncio.run(collect(running))) == 8
        assert len(running.unfinished) == 2


def test_what_cannot_be_is_refused():
    """
    A fraction out of range, no task at all, an agent that this run does not have, and an episode given twice.
    """
    with manager() as running:
        with pytest.raises(ValueError, match="min_fraction"):
            running.rollout(MIXED, min_fraction=0.0)
        with pytest.raises(ValueError, match="grace_s"):
            running.rollout(MIXED, grace_s=-1.0)
        with pytest.raises(DataError, match="no tasks"):
            running.rollout([], resume=True)
        running.rollout(MIXED, min_fraction=0.8)
        left = running.unfinished[0]
        other = evolve(left, spec=evolve(left.spec, agent_name="unknown"))
        with pytest.raises(DataError, match="unknown agent"):
            running.rollout([], resume=[other])
        with pytest.raises(DataError, match="more than once"):
            running.rollout([], resume=[left, left])
        assert len(running.unfinished) == 2


class TestFile:
    """Files that are not what they should be."""

    @pytest.fixture
    def lines(self, tmp_path):
        """A good file's lines."""
        with manager() as running:
            running.rollout(MIXED, min_fraction=0.8, grace_s=0.7)
            save_unfinished(tmp_path / "good.jsonl", running.unfinished)
        return (tmp_path / "good.jsonl").read_text().splitlines()

    @pytest.mark.parametrize(
        ("old", "new", "complaint"),
        [
            ('"version": 1', '"version": 2', "has version 2"),
            ('"turnwise unfinished', '"some other', "not a file of unfinished"),
            ('"num_prompt_tokens": 5', '"num_prompt_tokens": 4', "line 2"),
            ('"began": true', '"began": true, "surprise": 1', "line 2.*surprise"),
            ('"logprobs": [-', '"logprobs": [0, -', "line 2"),
            ('"state": "generating"', '"nostate": 1', "line 2.*state"),
        ],
    )
    def test_are_refused_by_line(self, lines, tmp_path, old, new, complaint):
        """
        One line says which line is wrong and how.
        """
        text = "\n".join(lines)
        assert old in text
        bad = tmp_path / "bad.jsonl"
        bad.write_text(text.replace(old, new))

        with pytest.raises(DataError, match=complaint):
            load_unfinished(bad)

    def test_a_missing_file_is_told(self, tmp_path):
        """
        The path is named.
        """
        with pytest.raises(DataError, match=r"nowhere\.jsonl"):
            load_unfinished(tmp_path / "nowhere.jsonl")
