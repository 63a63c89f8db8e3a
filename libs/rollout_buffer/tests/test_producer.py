"""The producer keeps groups in flight, within its limit, and loses none when it is paused."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from contextlib import suppress

import pytest
from attrs import evolve

from turnwise import EpisodeResult, Status, Task, TrajectoryScore, UnfinishedEpisode
from turnwise.errors import DataError
from turnwise.record.spec import EpisodeSpec
from turnwise_rollout_buffer.buffer import BufferClosedError, TrajectoryBuffer
from turnwise_rollout_buffer.producer import GroupProducer
from turnwise_rollout_buffer.task_stream import TaskStream

GROUP_SIZE = 3


class SlowManager:
    """A manager whose episodes take a moment each; `abort` interrupts them. It can fail at a task, or drop one."""

    def __init__(self, fail_at="", drop=""):
        self.fail_at, self.drop = fail_at, drop
        self.running, self.max_running = [], 0
        self.started = []

    async def stream(self, tasks, *, global_step, resume=()):
        specs = [each.spec for each in resume] + [
            spec for task in tasks for spec in self.specs(task, global_step) if task.uid != self.drop
        ]
        self.started += [f"{spec.uid} of {spec.global_step}" for spec in specs if not resume]
        aborted = asyncio.Event()
        here = (asyncio.get_running_loop(), aborted)
        self.running.append(here)
        self.max_running = max(self.max_running, len(self.running))
        try:
            for spec in specs:
                if spec.task.uid == self.fail_at:
                    raise DataError("no such row")
                with suppress(TimeoutError):
                    await asyncio.wait_for(aborted.wait(), 0.003)
                yield self.result(spec, cut=aborted.is_set())
        finally:
            self.running.remove(here)

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
        for loop, aborted in tuple(self.running):
            loop.call_soon_threadsafe(aborted.set)


def make_producer(manager, *, num_tasks=50, limit=4, seed=0, seen=lambda _episode: None):
    """Return a producer of groups of three, and its buffer."""
    tasks = [Task(messages=({"role": "user", "content": "?"},), uid=f"t{n}") for n in range(num_tasks)]
    buffer = TrajectoryBuffer(GROUP_SIZE, max_groups=limit)
    return GroupProducer(manager, TaskStream(tasks, seed=seed), buffer, limit, 2, seen), buffer


def finish_update(producer, buffer):
    """Finish an update as the training loop does."""
    buffer.set_version(0)
    producer.notify()


def names(groups):
    """Return the episodes of groups, with their steps."""
    return [f"{each.uid} of {each.global_step}" for group in groups for each in group.episodes]


def test_every_episode_comes_once():
    """Paused repeatedly, and continued by another producer, no episode is lost or repeated."""
    manager = SlowManager()
    producer, buffer = make_producer(manager)
    producer.start()
    taken, num_interrupted = [], 0
    for _ in range(8):
        taken += buffer.take(1, timeout_s=600)
        finish_update(producer, buffer)
        with producer.paused():
            interrupted = [f"{each.uid} of {each.spec.global_step}" for each in producer.unfinished]
            num_interrupted += len(interrupted)
            state = buffer.state_dict()
            waiting = [f"{each.uid} of {each.global_step}" for each in (*state["waiting"], *state["partial"])]
            assert sorted(manager.started) == sorted([*names(taken), *waiting, *interrupted])
    producer.stop()
    other_producer, other = make_producer(manager)
    other.load_state_dict(buffer.state_dict())
    other_producer.stream.load_state_dict(producer.stream.state_dict())
    other_producer.launched = producer.launched
    other_producer.load_partial(producer.unfinished)
    started = set(manager.started)
    other_producer.start()
    while started - set(names(taken)):
        taken += other.take(1, timeout_s=600)
        finish_update(other_producer, other)
    other_producer.stop()

    assert num_interrupted
    assert manager.max_running <= 4
    assert len(set(names(taken))) == len(names(taken))
    assert {1, 2} <= {group.episodes[0].global_step for group in taken}


def test_fewer_tasks_than_the_limit():
    """A task is not launched again while it is in flight, so the producer waits."""
    manager = SlowManager()
    producer, buffer = make_producer(manager, num_tasks=2, limit=6)
    producer.start()

    for _ in range(5):
        buffer.take(1, timeout_s=600)
        finish_update(producer, buffer)
    producer.stop()

    assert 2 == manager.max_running
    assert producer.failure is None


def test_a_dropped_prompt_leaves_nothing():
    """A group whose prompt was dropped ends without episodes, and the next ones follow."""
    producer, buffer = make_producer(SlowManager(drop="t1"), num_tasks=3, limit=2)
    producer.start()

    for _ in range(4):
        (group,) = buffer.take(1, timeout_s=600)
        assert "t1" != group.episodes[0].task.uid
        finish_update(producer, buffer)
    producer.stop()

    assert producer.failure is None


def test_a_failure_is_passed_on():
    """A failure wakes a waiting `take`, and is raised unchanged, not as an exception group."""
    producer, buffer = make_producer(SlowManager(fail_at="t1"), num_tasks=2, limit=2)
    producer.start()

    with pytest.raises(BufferClosedError):
        buffer.take(2, timeout_s=600)
    with pytest.raises(DataError, match="no such row"), producer.paused():
        raise AssertionError("paused after a failure")
    producer.stop()
    producer.notify()  # harmless


def test_pause_before_the_start():
    """A producer that was not started can be paused: a checkpoint may precede the first step."""
    producer, _buffer = make_producer(SlowManager())

    with producer.paused():
        assert () == producer.unfinished
    producer.stop()


@pytest.mark.parametrize("seed", range(6))
def test_groups_of_one_step_and_task_do_not_mix(seed):
    """If a pass over the tasks ends within a step, a task with a group in the buffer is not launched again."""
    producer, buffer = make_producer(SlowManager(), num_tasks=3, limit=2, seed=seed)
    producer.start()

    for _ in range(9):
        while buffer.num_ahead < 2 and producer.failure is None:
            time.sleep(0.001)  # until both groups are in the buffer, and none is in flight
        buffer.take(1, timeout_s=600)
        finish_update(producer, buffer)
    producer.stop()

    assert producer.failure is None


def test_a_pause_reaches_groups_that_were_just_launched():
    """A group whose task has not run yet when the pause comes is interrupted as well, not awaited to its end."""

    class HangingManager(SlowManager):
        """Episodes end only by `abort`."""

        async def stream(self, tasks, *, global_step, resume=()):
            aborted = asyncio.Event()
            self.running.append((asyncio.get_running_loop(), aborted))
            await aborted.wait()
            for task in tasks:
                for spec in self.specs(task, global_step):
                    yield self.result(spec, cut=True)

    async def launch_and_pause():
        producer, _buffer = make_hand_driven(HangingManager())
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(producer._roll_out(producer._next()))
            await producer._pause()
        return producer.unfinished

    assert GROUP_SIZE == len(asyncio.run(launch_and_pause()))


def make_hand_driven(manager):
    """Return a producer in the running event loop, where the test calls its methods, and its buffer."""
    producer, buffer = make_producer(manager)
    producer._loop, producer._changed = asyncio.get_running_loop(), asyncio.Event()
    return producer, buffer


def test_an_interrupt_outlasts_the_pause_of_a_checkpoint():
    """A checkpoint ends between an interrupt and its abort: episodes that it aborts are kept as interrupted."""

    async def interrupt_at_the_end_of_a_pause():
        manager = SlowManager()
        producer, buffer = make_hand_driven(manager)
        await producer._pause()
        producer.interrupt_soon()
        await producer._resume()
        has_room = producer._has_room()
        async with asyncio.TaskGroup() as group:
            group.create_task(producer._roll_out(producer._next()))
            await asyncio.sleep(0)  # it runs until its first episode
            manager.abort()
        return producer.unfinished, has_room, buffer

    unfinished, has_room, buffer = asyncio.run(interrupt_at_the_end_of_a_pause())

    assert GROUP_SIZE == len(unfinished)
    assert not has_room
    assert not buffer.state_dict()["partial"]


def test_the_abort_of_a_pause_does_not_reach_later_groups():
    """All groups end by themselves before the abort arrives. The pause waits for it, or it would end the next ones."""

    async def pause_with_a_late_abort():
        late = Future()
        manager = SlowManager()
        manager.abort = lambda: late
        producer, _buffer = make_hand_driven(manager)
        async with asyncio.TaskGroup() as group:
            pausing = group.create_task(producer._pause())
            for _ in range(20):
                await asyncio.sleep(0)
            is_early = pausing.done()
            late.set_result(None)
        return is_early

    assert not asyncio.run(pause_with_a_late_abort())
