"""The producer keeps groups on their way, within the bound, and loses none when it is held."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from attrs import evolve

from turnwise import EpisodeResult, Status, Task, TrajectoryScore, UnfinishedEpisode
from turnwise.episode_spec import EpisodeSpec
from turnwise.errors import DataError
from turnwise_grpo_trainer.buffer import BufferClosedError, TrajectoryBuffer
from turnwise_grpo_trainer.producer import GroupProducer
from turnwise_grpo_trainer.task_stream import TaskStream

GROUP_SIZE = 3


class SlowManager:
    """Episodes take a moment each; `abort` cuts those that run. It fails or drops for some tasks, if asked to."""

    def __init__(self, fail_at="", drop=""):
        self.fail_at, self.drop = fail_at, drop
        self.aborts, self.most = [], 0
        self.begun = []

    async def stream(self, tasks, *, global_step, resume=()):
        specs = [each.spec for each in resume] + [
            spec for task in tasks for spec in self.specs(task, global_step) if task.uid != self.drop
        ]
        self.begun += [f"{spec.uid} of {spec.global_step}" for spec in specs if not resume]
        aborted = asyncio.Event()
        here = (asyncio.get_running_loop(), aborted)
        self.aborts.append(here)
        self.most = max(self.most, len(self.aborts))
        try:
            for spec in specs:
                if spec.task.uid == self.fail_at:
                    raise DataError("no such row")
                with suppress(TimeoutError):
                    await asyncio.wait_for(aborted.wait(), 0.003)
                yield self.result(spec, cut=aborted.is_set())
        finally:
            self.aborts.remove(here)

    def specs(self, task, step):
        return [EpisodeSpec(task=task, agent_name="a", rollout_n=n, global_step=step) for n in range(GROUP_SIZE)]

    def result(self, spec, *, cut):
        result = EpisodeResult(
            task=spec.task,
            rollout_n=spec.rollout_n,
            global_step=spec.global_step,
            status=Status.COMPLETED,
            scores=(TrajectoryScore(value=1.0),),
        )
        return evolve(result, status=Status.ABORTED, unfinished=UnfinishedEpisode(spec=spec)) if cut else result

    def abort(self):
        for loop, aborted in tuple(self.aborts):
            loop.call_soon_threadsafe(aborted.set)


def producer_of(manager, *, num_tasks=50, limit=4, seen=lambda _episode: None):
    """Return a producer of groups of three, and its buffer."""
    tasks = [Task(messages=({"role": "user", "content": "?"},), uid=f"t{n}") for n in range(num_tasks)]
    buffer = TrajectoryBuffer(GROUP_SIZE, max_groups=limit)
    return GroupProducer(manager, TaskStream(tasks, seed=0), buffer, limit, 2, seen), buffer


def learnt(producer, buffer):
    """Say what follows an update."""
    buffer.set_version(0)
    producer.look_again()


def names(groups):
    """Return the episodes of groups, with the step."""
    return [f"{each.uid} of {each.global_step}" for group in groups for each in group.episodes]


def test_every_episode_comes_once():
    """Held at many moments, and gone on with by another one, nothing is lost and nothing comes twice."""
    manager = SlowManager()
    producer, buffer = producer_of(manager)
    producer.start()
    taken, num_cut = [], 0
    for _ in range(8):
        taken += buffer.take(1, timeout_s=30)
        learnt(producer, buffer)
        with producer.held():
            cut = [f"{each.uid} of {each.spec.global_step}" for each in producer.unfinished]
            num_cut += len(cut)
            state = buffer.state_dict()
            waiting = [f"{each.uid} of {each.global_step}" for each in (*state["waiting"], *state["partial"])]
            assert sorted(manager.begun) == sorted([*names(taken), *waiting, *cut])
    producer.stop()
    other_producer, other = producer_of(manager)
    other.load_state_dict(buffer.state_dict())
    other_producer.stream.load_state_dict(producer.stream.state_dict())
    other_producer.launched = producer.launched
    other_producer.go_on_with(producer.unfinished)
    begun = set(manager.begun)
    other_producer.start()
    while begun - set(names(taken)):
        taken += other.take(1, timeout_s=30)
        learnt(other_producer, other)
    other_producer.stop()

    assert num_cut
    assert manager.most <= 4
    assert len(set(names(taken))) == len(names(taken))
    assert {1, 2} <= {group.episodes[0].global_step for group in taken}


def test_fewer_tasks_than_may_be_on_their_way():
    """A task is not begun again while it is on its way, so there is nothing to begin for a while."""
    manager = SlowManager()
    producer, buffer = producer_of(manager, num_tasks=2, limit=6)
    producer.start()

    for _ in range(5):
        buffer.take(1, timeout_s=30)
        learnt(producer, buffer)
    producer.stop()

    assert 2 == manager.most
    assert producer.failure is None


def test_a_dropped_prompt_leaves_nothing():
    """A group without episodes ends, and the next ones come."""
    producer, buffer = producer_of(SlowManager(drop="t1"), num_tasks=3, limit=2)
    producer.start()

    for _ in range(4):
        (group,) = buffer.take(1, timeout_s=30)
        assert "t1" != group.episodes[0].task.uid
        learnt(producer, buffer)
    producer.stop()

    assert producer.failure is None


def test_a_failure_is_passed_on():
    """What ends the producer wakes who waits for groups, and is raised as it was, not in a group."""
    producer, buffer = producer_of(SlowManager(fail_at="t1"), num_tasks=2, limit=2)
    producer.start()

    with pytest.raises(BufferClosedError):
        buffer.take(2, timeout_s=30)
    with pytest.raises(DataError, match="no such row"), producer.held():
        raise AssertionError("held after a failure")
    producer.stop()
    producer.look_again()  # harmless


def test_before_it_begins():
    """A checkpoint may be written before the first step."""
    producer, _buffer = producer_of(SlowManager())

    with producer.held():
        assert () == producer.unfinished
    producer.stop()
