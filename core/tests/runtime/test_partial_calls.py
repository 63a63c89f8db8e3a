"""Calls that end before their last episode, and calls that resume the episodes of earlier ones."""

import asyncio
import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from attrs import evolve

from turnwise import SamplingParams, State, Status, Task
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import Limits
from turnwise.errors import DataError
from turnwise.record.invariants import check_trajectory
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.worker import WorkerComponents
from turnwise.types import Capabilities
from turnwise_result_files import load_unfinished, save_unfinished
from turnwise_testing.engines.scripted import RandomPolicy, ScriptedEngine


class TwoTurns:
    """Two turns with an observation between them."""

    async def step(self, episode):
        if episode.state == State.PENDING:
            episode.begin(np.frombuffer(episode.task.uid.encode(), np.uint8))
            return State.GENERATING
        await episode.generate()
        if len(episode.trajectory.turns()) == 2:
            return State.TERMINATED
        episode.observe(np.array([1, 2]))
        return State.GENERATING


def token_s(request):
    """Return the seconds for each token: the episodes of slow tasks never end."""
    return 0.5 if request.group_id.startswith("slow") else 0.0


class Pace:
    """The speed of an engine, which a test changes between two calls."""

    factor = 1.0

    def __call__(self, request, _index):
        return self.factor * token_s(request)


def manager(pace=None, *, num_workers=1, **plan):
    pace = pace or Pace()
    engine = ScriptedEngine(policy=RandomPolicy(seed=1, end_token_id=255, mean_tokens=12), token_latency_s=pace)
    parts = WorkerComponents(
        engine=engine,
        programs={"two": EpisodeProgram(agent=TwoTurns())},
        limits=Limits(response_length=200),
        stop_token_ids=(255,),
    )
    plan.setdefault("sampling", SamplingParams(max_tokens=40))
    made = RolloutPlan(default_agent="two", agents={"two": None}, **plan)
    return RolloutManager(LocalRuntime(engine, parts, num_workers), made)


def tasks(*uids):
    return [Task(messages=({"role": "user", "content": "x"},), uid=uid, sample_index=i) for i, uid in enumerate(uids)]


MIXED = tasks("a", "slow1", "b", "c", "d", "slow2", "e", "f", "g", "h")


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_call_ends_at_its_threshold(num_workers):
    """When 8 of 10 episodes have finished, the two slow ones are interrupted and kept, and are in no batch."""
    with manager(num_workers=num_workers) as running:
        results = running.rollout(MIXED, min_fraction=0.8)

        assert [r.task.uid for r in results] == list("abcdefgh")
        assert {u.uid for u in running.unfinished} == {"slow1/0", "slow2/0"}
        assert {r.status for r in results} <= {Status.COMPLETED, Status.TRUNCATED}


def test_the_next_call_resumes_them_under_new_weights():
    """Tokens from before the interrupt keep their version and log-probabilities; later ones have the new version."""
    pace = Pace()
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
    Episodes that finish within the grace are in the batch, and a complete call does not wait for its end.
    """
    pace = Pace()
    pace.factor = 0.01
    with manager(pace) as running:
        results = running.rollout(MIXED, min_fraction=0.8, grace_s=3600)

        assert len(results) == 10
        assert running.unfinished == ()


def test_every_episode_finishes_in_one_of_many_calls():
    """However often calls end early, each episode finishes in exactly one of them."""
    pace, done = Pace(), Counter()
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


def test_groups_are_adjacent():
    """Resumed episodes come first, and the episodes of a group are adjacent."""
    pace = Pace()
    with manager(pace, n=3) as running:
        running.rollout(tasks("slow1", "a", "slow2"), min_fraction=0.3)
        unfinished = running.unfinished
        pace.factor = 0.0
        results = running.rollout(tasks("b", "slow1"), resume=[unfinished[0], unfinished[4], unfinished[1]])

        assert len(running.unfinished) == len(unfinished) - 3
    names = [r.task.uid for r in results]
    assert [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name] == list(dict.fromkeys(names))


def test_two_calls_at_once_continue_an_episode_once():
    """Both ask for all unfinished episodes, and each reads its tasks while the other one starts."""
    pace, both, results = Pace(), threading.Barrier(2, timeout=60), {}

    def slow_tasks(uid):
        both.wait()
        yield from tasks(uid)

    with manager(pace) as running:
        running.rollout(MIXED, min_fraction=0.8)
        pace.factor = 0.0

        def call(uid):
            results[uid] = running.rollout(slow_tasks(uid), resume=True)

        threads = [threading.Thread(target=call, args=(uid,)) for uid in ("new1", "new2")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {"resumed": 2} == {"resumed": running.stats()["resumed"]}
    assert ["new1", "new2", "slow1", "slow2"] == sorted(r.task.uid for found in results.values() for r in found)


def test_a_rejected_call_loses_no_episode():
    """Also if reading its tasks fails, and in the same order as before."""
    with manager() as running:
        running.rollout(MIXED, min_fraction=0.8)
        before = running.unfinished
        for resume in (True, before[1:]):
            with pytest.raises(ZeroDivisionError):
                running.rollout((1 // 0 for _ in range(1)), resume=resume)
        assert 2 == len(before)
        assert set(map(id, before)) == set(map(id, running.unfinished))


def test_two_threads_start_and_stop_a_manager_once():
    """A second start waits for the first one, and a second stop finds nothing to do."""
    running, calls, both = manager(), Counter(), threading.Barrier(2, timeout=60)

    def counted(name, method):
        async def call():
            calls[name] += 1
            await asyncio.sleep(0)
            await method()

        return call

    counting = {name: counted(name, getattr(running.runtime, name)) for name in ("start", "stop")}
    running.runtime = SimpleNamespace(**counting, counts=running.runtime.counts, capabilities=Capabilities())

    def use():
        both.wait()
        running.start()
        both.wait()
        running.stop()

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {"start": 1, "stop": 1} == calls


def test_aborted_episodes_can_be_resumed():
    """After an abort the episodes are among the results as aborted, and a later call resumes them."""
    pace = Pace()
    with manager(pace) as running:
        episodes = running.iterate(MIXED)
        finished = [next(episodes) for _ in range(8)]
        running.abort()
        aborted = list(episodes)
        pace.factor = 0.0
        resumed = running.rollout([], resume=True)

    assert Status.ABORTED not in {r.status for r in finished}
    assert {r.status for r in aborted} == {Status.ABORTED}
    assert {r.task.uid for r in aborted} == {"slow1", "slow2"} == {r.task.uid for r in resumed}
    for before, after in zip(sorted(aborted, key=lambda r: r.uid), sorted(resumed, key=lambda r: r.uid), strict=True):
        had = before.trajectories[0].input_ids.tolist()
        assert after.trajectories[0].input_ids[: len(had)].tolist() == had


def test_another_process_resumes_from_a_file(tmp_path):
    """Another manager finishes the episodes of a file, and starts the ones that had not started."""
    with manager() as running:
        running.rollout(MIXED, min_fraction=0.7)
        left = running.unfinished
        save_unfinished(tmp_path / "unfinished.jsonl", left)
    pace = Pace()
    pace.factor = 0.0
    with manager(pace) as running:
        results = running.rollout([], resume=load_unfinished(tmp_path / "unfinished.jsonl"))

    assert {r.uid for r in results} == {u.uid for u in left}
    assert {r.status for r in results} <= {Status.COMPLETED, Status.TRUNCATED}


def test_a_stream_ends_at_its_threshold():
    """The iterator ends when enough episodes have finished."""

    async def collect(running):
        return [result async for result in running.stream(MIXED, min_fraction=0.8)]

    with manager() as running:
        assert len(asyncio.run(collect(running))) == 8
        assert len(running.unfinished) == 2


def test_bad_options_are_rejected():
    """
    Errors: an option out of range, no task, an unknown agent, and an episode given twice; none loses an episode.
    """
    with manager() as running:
        with pytest.raises(ValueError, match="min_fraction"):
            running.rollout(MIXED, min_fraction=0.0)
        with pytest.raises(ValueError, match="grace_s"):
            running.rollout(MIXED, grace_s=-1.0)
        with pytest.raises(TypeError, match=r"unknown option 'min_fracton'; .* are min_fraction, grace_s, resume"):
            running.rollout(MIXED, min_fracton=0.5)
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
    """Damaged and missing files of unfinished episodes."""

    @pytest.fixture
    def lines(self, tmp_path):
        """The lines of a good file."""
        with manager() as running:
            running.rollout(MIXED, min_fraction=0.8, grace_s=0.7)
            save_unfinished(tmp_path / "good.jsonl", running.unfinished)
        return (tmp_path / "good.jsonl").read_text().splitlines()

    @pytest.mark.many_cases(3)
    @pytest.mark.parametrize(
        ("old", "new", "complaint"),
        [
            ('"version": 2', '"version": 1', "has version 1"),
            ('"turnwise unfinished', '"some other', "not a file of unfinished"),
            ('"num_prompt_tokens": 5', '"num_prompt_tokens": 4', "line 2"),
            ('"started": true', '"started": true, "surprise": 1', "line 2.*surprise"),
            ('"logprobs": [-', '"logprobs": [0, -', "line 2"),
            ('"state": "generating"', '"nostate": 1', "line 2.*state"),
        ],
    )
    def test_a_damaged_line_is_named(self, lines, tmp_path, old, new, complaint):
        """The error has one line with the line number and the problem."""
        text = "\n".join(lines)
        assert old in text
        bad = tmp_path / "bad.jsonl"
        bad.write_text(text.replace(old, new))

        with pytest.raises(DataError, match=complaint):
            load_unfinished(bad)

    def test_a_missing_file_is_named(self, tmp_path):
        """The error names the path."""
        with pytest.raises(DataError, match=r"nowhere\.jsonl"):
            load_unfinished(tmp_path / "nowhere.jsonl")
