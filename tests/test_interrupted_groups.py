"""A group reward scores each group once, despite pauses, interrupts, checkpoints and resumes."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from attrs import define, evolve, field
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import SamplingParams, State, Task, TrajectoryScore
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import Limits
from turnwise.events.dispatch import Observers
from turnwise.runtime.groups import GroupScoring
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.worker import WorkerComponents
from turnwise_grpo_trainer.config import BufferConfig, TrainConfig
from turnwise_grpo_trainer.loop.checkpoints import CheckpointStore, TrainingState
from turnwise_grpo_trainer.loop.interrupts import Interrupt, TrainingInterruptedError
from turnwise_grpo_trainer.loop.sync_collector import SyncCollector
from turnwise_grpo_trainer.objective.advantages import grpo
from turnwise_result_files import load_unfinished, save_unfinished
from turnwise_rollout_buffer import GroupProducer, GroupReward, GroupRewardConfig, TaskStream, TrajectoryBuffer
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.simulation.tracing import TracingPolicy

N = 4
UIDS = ("a", "b")
MEMBERS = [(uid, number) for uid in UIDS for number in range(N)]
HANGS_S = 10_000.0


class Relative(GroupReward):
    """The length of each answer relative to the longest of its group, plus its own reward; it counts ended members."""

    def __init__(self, min_fraction):
        super().__init__(GroupRewardConfig(min_fraction=min_fraction))
        self.opened, self.ended, self.scored = threading.Event(), threading.Semaphore(0), []

    def score_group(self, episodes):
        self.scored.append([each.uid for each in episodes])
        lengths = [int(each.trajectories[0].response_mask.sum()) for each in episodes]
        return [each.reward + length / max(lengths) for each, length in zip(episodes, lengths, strict=True)]

    @asynccontextmanager
    async def collect(self, call):
        def counted(number, result):
            add(number, result)
            self.ended.release()

        async with super().collect(call) as add:
            self.opened.set()
            yield counted


class Length:
    """The number of response tokens, in hundreds, as a reward of each episode."""

    def score(self, episode):
        return TrajectoryScore(value=episode.trajectory.num_response_tokens / 100)


@define
class OneTurn:
    """Samples once; some members fail, and some hang until they are interrupted."""

    fails: frozenset
    slow: set = field(factory=set)

    async def step(self, episode):
        if episode.state == State.PENDING:
            episode.begin(np.array([ord(episode.task.uid), episode.rollout_n]))
            return State.GENERATING
        if (episode.task.uid, episode.rollout_n) in self.fails:
            raise RuntimeError("as asked")
        await episode.generate()
        return State.TERMINATED


@define
class Run:
    """One process of a run: a manager, its agent and its group reward."""

    agent: OneTurn
    reward: Relative
    manager: RolloutManager

    def wait_for(self, num):
        """Wait until so many members have ended in this process."""
        for _ in range(num):
            assert self.reward.ended.acquire(timeout=60)


def run_of(fails, min_fraction, slow=()):
    """Return a process in which the members `slow` hang, until `agent.slow` is cleared."""
    agent, reward = OneTurn(frozenset(fails), set(slow)), Relative(min_fraction)
    # Its tokens do not depend on the place where an interrupt or a pause cuts a turn.
    engine = ScriptedEngine(policy=TracingPolicy(end_token_id=255, mean_tokens=12))
    engine.token_latency_s = lambda request, _index: HANGS_S if _member(request) in agent.slow else 0.0
    parts = WorkerComponents(
        engine=engine,
        programs={"one": EpisodeProgram(agent=agent, reward=Length())},
        limits=Limits(response_length=200),
        stop_token_ids=(255,),
        observers=(observers := Observers.of([])),
    )
    plan = RolloutPlan(default_agent="one", agents={"one": None}, n=N, sampling=SamplingParams(max_tokens=40))
    groups = GroupScoring(reward, "group reward", plan, observers, 5.0)
    return Run(agent, reward, RolloutManager(LocalRuntime(engine, parts), plan, observers, groups=groups))


def _member(request):
    uid, number = request.token_ids[:2].tolist()
    return chr(uid), number


TASKS = [Task(messages=({"role": "user", "content": "?"},), uid=uid) for uid in UIDS]


def rollout(runs, folder):
    """Roll out in parts: each is aborted when the members that do not hang have ended, and the next part resumes it."""
    tasks, unfinished, ended = TASKS, (), []
    for part, run in enumerate(runs):
        with run.manager as manager:
            if run.agent.slow:
                stopper = _interrupt_later(run, part, manager.abort)
            ended += [e for e in manager.rollout(tasks, resume=unfinished) if e.unfinished is None]
            if run.agent.slow:
                stopper.join()
            save_unfinished(folder / f"{part}.jsonl", manager.unfinished)
        tasks, unfinished = [], load_unfinished(folder / f"{part}.jsonl")
        if not unfinished:
            break
    return ended


def threshold(runs, folder):
    """Roll out in one process: each call ends when as many episodes as do not hang have ended."""
    first, ended = runs[0], []
    with first.manager as manager:
        for part, run in enumerate(runs):
            first.agent.slow.clear()
            first.agent.slow.update(run.agent.slow)
            first.reward.opened.clear()
            first.reward.ended = threading.Semaphore(0)
            tasks, resume = (TASKS, False) if part == 0 else ([], True)
            if part == 0 or manager.unfinished:
                waiting = evolve(run, reward=first.reward)
                stopper = _interrupt_later(waiting, part, manager.abort) if run.agent.slow else None
                results = manager.rollout(tasks, resume=resume, min_fraction=0.99 if run.agent.slow else 1.0)
                ended += [each for each in results if each.unfinished is None]
                if stopper:
                    stopper.join()
    return ended


def sync_training(runs, folder):
    """Train in mode `sync`: the training is interrupted, writes a checkpoint, and another process resumes it."""
    for part, run in enumerate(runs):
        training = SyncTraining(run)
        store = CheckpointStore(folder, keep_last=1)
        if part:
            store.load(training, store.latest())
        with run.manager:
            if run.agent.slow:
                stopper = _interrupt_later(run, part, training.stop)
            with suppress(TrainingInterruptedError):
                return [each for group in training.collector.collect(1) for each in group.episodes]
            stopper.join()
        store.save(training)
    raise AssertionError("the last part has no slow member")


@define
class SyncTraining:
    """The state of a training of mode `sync` in a checkpoint, as its loop writes and reads it."""

    run: Run
    buffer: TrajectoryBuffer = field(factory=lambda: TrajectoryBuffer(N, 4))
    interrupt: Interrupt = field(factory=Interrupt)
    collector: SyncCollector = field(init=False)
    step = 0
    kept_step = None

    def __attrs_post_init__(self):
        train = TrainConfig(tasks_per_step=len(UIDS), buffer=BufferConfig())
        stream = TaskStream(TASKS, 0)
        self.collector = SyncCollector(self.run.manager, stream, self.buffer, train, self.interrupt, lambda _e: None)

    def stop(self):
        self.interrupt.requested = True
        self.run.manager.abort()

    def save_models(self, folder):
        folder.mkdir()

    def load_models(self, folder):
        assert folder.is_dir()

    def state_dict(self):
        state = self.buffer.state_dict()
        waiting, partial = state.pop("waiting"), state.pop("partial")
        progress = {"source": self.collector.state_dict(), "buffer": state}
        return TrainingState(progress=progress, waiting=waiting, partial=partial, unfinished=self.collector.unfinished)

    def load_state_dict(self, state):
        self.buffer.load_state_dict({**state.progress["buffer"], "waiting": state.waiting, "partial": state.partial})
        self.collector.load_state_dict(state.progress["source"], step=0)
        self.collector.load_partial(state.unfinished)


def async_training(runs, folder):
    """Train in mode `async`: checkpoints pause the rollout, which continues in the same process."""
    first, buffer, taken = runs[0], TrajectoryBuffer(N, 4), []
    with first.manager as manager:
        producer = GroupProducer(manager, TaskStream(TASKS, 0), buffer, 2, 2, lambda _episode: None)
        producer.start()
        for run in runs:
            first.wait_for(len(MEMBERS) - len(first.agent.slow & set(MEMBERS)) if run is first else 0)
            with producer.paused():
                first.agent.slow.clear()
                first.agent.slow.update(run.agent.slow)
                save_unfinished(folder / "unfinished.jsonl", producer.unfinished)
        taken = buffer.take(2, timeout_s=60)
        producer.stop()
    return [each for group in taken for each in group.episodes]


def async_resumed(runs, folder):
    """Train in mode `async`: each process ends with a checkpoint, and another one resumes."""
    state, position, launched, unfinished = None, None, 0, []
    for part, run in enumerate(runs):
        buffer = TrajectoryBuffer(N, 4)
        with run.manager as manager:
            producer = GroupProducer(manager, TaskStream(TASKS, 0), buffer, 2, 2, lambda _episode: None)
            if state is not None:
                buffer.load_state_dict(state)
                producer.stream.load_state_dict(position)
                producer.launched = launched
                producer.load_partial(unfinished)
            producer.start()
            if not run.agent.slow:
                taken = buffer.take(2, timeout_s=60)
                producer.stop()
                return [each for group in taken for each in group.episodes]
            if part == 0:
                run.wait_for(len(MEMBERS) - len(run.agent.slow))
            producer.stop()
        state, position, launched = buffer.state_dict(), producer.stream.state_dict(), producer.launched
        save_unfinished(folder / f"{part}.jsonl", producer.unfinished)
        unfinished = load_unfinished(folder / f"{part}.jsonl")
    raise AssertionError("the last part has no slow member")


def _interrupt_later(run, part, interrupt):
    """Interrupt the first part of a run when the members that do not hang have ended, and any later one at once."""

    def wait():
        assert run.reward.opened.wait(timeout=60)
        run.wait_for(0 if part else len(MEMBERS) - len(run.agent.slow))
        interrupt()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def outcome(episodes):
    """Return status, reward, tokens and the advantage of each episode, by name."""
    episodes = sorted(episodes, key=lambda each: each.uid)
    rewards = torch.tensor([each.reward or 0.0 for each in episodes])
    groups = torch.tensor([UIDS.index(each.task.uid) for each in episodes])
    valid = torch.tensor([each.reward is not None for each in episodes])
    advantages = grpo(rewards, groups, valid).tolist()
    return {
        each.uid: (each.status, each.reward, [t.response_ids.tolist() for t in each.trajectories], advantage)
        for each, advantage in zip(episodes, advantages, strict=True)
    }


@pytest.mark.many_cases(2)
@pytest.mark.parametrize("drive", [rollout, threshold, sync_training, async_training, async_resumed])
@given(
    fails=st.sets(st.sampled_from(MEMBERS), max_size=4),
    min_fraction=st.sampled_from([0.25, 0.5, 0.75, 1.0]),
    moments=st.lists(st.sets(st.sampled_from(MEMBERS), min_size=1, max_size=7), min_size=1, max_size=2),
)
@settings(max_examples=6)
def test_interrupts_change_no_reward(drive, fails, min_fraction, moments):
    """Rewards, advantages, faults and tokens equal the undisturbed run's, and no group is scored twice."""
    undisturbed = run_of(fails, min_fraction)
    with undisturbed.manager as manager:
        expected = outcome(manager.rollout(TASKS, global_step=0 if drive in (rollout, threshold) else 1))
    # A member that fails does so at once, and never hangs.
    parts = [run_of(fails, min_fraction, slow - fails) for slow in moments if slow - fails]
    runs = [*parts, run_of(fails, min_fraction)]
    with TemporaryDirectory() as folder:
        episodes = drive(runs, Path(folder))

    assert expected == outcome(episodes)
    assert len(expected) == len(episodes)
    scored = [uids for run in runs for uids in run.reward.scored]
    assert sorted(map(sorted, undisturbed.reward.scored)) == sorted(map(sorted, scored))
