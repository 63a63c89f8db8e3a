"""Mode `async` trains on no group twice under one name, in any order of ends, updates and checkpoints."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise import EpisodeResult, Status, Task, TrajectoryScore, UnfinishedEpisode
from turnwise.errors import TurnwiseError
from turnwise.record.spec import EpisodeSpec
from turnwise_grpo_trainer.config import BufferConfig, TrainConfig
from turnwise_grpo_trainer.loop.async_collector import AsyncCollector
from turnwise_grpo_trainer.loop.interrupts import Interrupt
from turnwise_grpo_trainer.loop.sync_collector import SyncCollector
from turnwise_rollout_buffer import EpisodeGroup
from turnwise_rollout_buffer.buffer import TrajectoryBuffer
from turnwise_rollout_buffer.task_stream import TaskStream

GROUP_SIZE = 2


class Gated:
    """A manager whose groups end when the test says so; an abort leaves their episodes unfinished."""

    def __init__(self):
        self.running = []

    async def stream(self, tasks, *, global_step, resume=()):
        specs = [each.spec for each in resume]
        for task in tasks:
            specs += [EpisodeSpec(task=task, agent_name="a", rollout_n=n, global_step=global_step) for n in range(2)]
        ended = asyncio.get_running_loop().create_future()
        self.running.append(ended)
        aborted = await ended
        self.running.remove(ended)
        for spec in specs:
            yield result_of(spec, aborted=aborted)

    def finish(self, number):
        """End a running group, if there is one."""
        waiting = [each for each in self.running if not each.done()]
        if waiting:
            waiting[number % len(waiting)].set_result(False)

    def abort(self):
        for each in self.running:
            if not each.done():
                each.set_result(True)


def result_of(spec, *, aborted=False):
    """Return an episode that has ended or was interrupted."""
    names = {"task": spec.task, "rollout_n": spec.rollout_n, "global_step": spec.global_step}
    if aborted:
        return EpisodeResult(**names, status=Status.ABORTED, unfinished=UnfinishedEpisode(spec=spec))
    return EpisodeResult(**names, status=Status.COMPLETED, scores=(TrajectoryScore(value=float(spec.rollout_n)),))


class Training:
    """An asynchronous training without a trainer, on the test's event loop: nothing moves but by an action."""

    def __init__(self, num_tasks, per_step, staleness):
        self.shape, self.step, self.names = (num_tasks, per_step, staleness), 0, []
        self.start()

    def start(self, collector=None):
        num_tasks, per_step, staleness = self.shape
        self.manager = Gated()
        train = TrainConfig(mode="async", tasks_per_step=per_step, buffer=BufferConfig(max_staleness=staleness))
        tasks = make_tasks(num_tasks)
        buffer = TrajectoryBuffer(GROUP_SIZE, 2 * per_step, max_staleness=staleness)
        stream = TaskStream(tasks, 0)
        self.collector = AsyncCollector.create(self.manager, stream, buffer, train, Interrupt(), lambda _e: None)
        if collector is not None:
            buffer.load_state_dict(collector.buffer.state_dict())
            self.collector.load_state_dict(json.loads(json.dumps(collector.state_dict())), step=self.step)
            self.collector.load_partial(collector.unfinished)
        producer = self.collector.producer
        producer._uids = frozenset(task.uid for task in tasks)
        producer._loop, producer._changed = asyncio.get_running_loop(), asyncio.Event()
        self.producing = asyncio.get_running_loop().create_task(producer._produce())

    async def settle(self):
        """Let the producer do everything that it can."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def act(self, action):
        """End a group (0 to 5), make a step if its groups are there (6, 7), write a checkpoint (8) or restart (9)."""
        producer = self.collector.producer
        if action < 6:
            self.manager.finish(action)
        elif action < 8:
            if len(self.collector.buffer) >= self.shape[1]:
                self.make_step()
        elif action == 8:
            await producer._pause()
            await producer._resume()
        else:
            await self.stop()
            self.start(self.collector)
        await self.settle()

    def make_step(self):
        self.step += 1
        self.names += [group.key[:2] for group in self.collector.collect(self.step)]
        self.collector.buffer.set_version(0)
        self.collector.notify()

    async def stop(self):
        await self.collector.producer._stop()
        await self.producing


def make_tasks(num):
    return [Task(messages=({"role": "user", "content": "?"},), uid=f"t{n}") for n in range(num)]


@given(
    num_tasks=st.integers(1, 10),
    per_step=st.integers(1, 10),
    staleness=st.integers(0, 2),
    actions=st.lists(st.integers(0, 9), max_size=80),
)
def test_no_group_is_trained_twice_under_one_name(num_tasks, per_step, staleness, actions):
    """Every name is taken once, no step has more groups than it asks for, and the training never stands still."""
    per_step = min(per_step, num_tasks)

    async def train():
        training = Training(num_tasks, per_step, staleness)
        await training.settle()
        for action in actions:
            await training.act(action)
        goal = training.step + 3
        for number in range(20 * 3 * per_step):
            await training.act(number % 6)
            await training.act(6)
            if training.step >= goal:
                break
        await training.stop()
        return training, goal

    training, goal = asyncio.run(train())
    assert training.step >= goal
    assert len(set(training.names)) == len(training.names)
    steps = [step for _uid, step in training.names]
    assert max(steps.count(step) for step in steps) <= per_step


def test_a_group_that_comes_again_is_refused():
    """A collector that gets a name for the second time says which step had it, and does not train on it."""

    async def train():
        training = Training(4, 1, 0)
        await training.settle()
        await training.stop()
        return training.collector

    collector = asyncio.run(train())
    spec = EpisodeSpec(task=make_tasks(1)[0], agent_name="a", global_step=1)
    group = EpisodeGroup((result_of(spec),))
    collector._check_new([group], 1)
    with pytest.raises(
        TurnwiseError, match="step 2 got the group of task 't0' for step 1, which step 1 has trained on"
    ):
        collector._check_new([group], 2)


def test_a_mode_keeps_the_names_of_the_other():
    """A checkpoint of mode `async` in mode `sync`: tasks that were launched for a later step are not drawn for it."""
    train, stream = TrainConfig(tasks_per_step=2), TaskStream(make_tasks(4), 0)
    buffer, drawn = TrajectoryBuffer(GROUP_SIZE, 4), []

    class Instant:
        def iterate(self, tasks, *, global_step, resume=()):
            drawn.append((global_step, sorted(task.uid for task in tasks)))
            specs = [
                EpisodeSpec(task=t, agent_name="a", rollout_n=n, global_step=global_step) for t in tasks for n in (0, 1)
            ]
            return map(result_of, specs)

    collector = SyncCollector(Instant(), stream, buffer, train, Interrupt(), lambda _episode: None)
    state = {"stream": stream.state_dict(), "launched": 4, "launched_for": [[2, ["t0", "t1"]], [3, ["t2"]]]}
    collector.load_state_dict(json.loads(json.dumps(state)), step=1)
    collector.collect(2)
    collector.collect(3)

    assert (2, ["t2", "t3"]) == drawn[0]
    assert "t2" not in drawn[1][1]
    assert [[2, ["t0", "t1"]], [3, ["t2"]]] == collector.state_dict()["launched_for"]
