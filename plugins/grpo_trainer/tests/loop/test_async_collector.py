"""The collector of mode `async`: its state, and the end of the rollout thread."""

from __future__ import annotations

import pytest

from turnwise import EpisodeResult, Status, Task, Trajectory, TrajectoryScore
from turnwise_grpo_trainer.config import BufferConfig, TrainConfig
from turnwise_grpo_trainer.loop.async_collector import AsyncCollector
from turnwise_grpo_trainer.loop.interrupts import Interrupt, TrainingInterruptedError
from turnwise_rollout_buffer.buffer import TrajectoryBuffer
from turnwise_rollout_buffer.task_stream import TaskStream

TASKS_PER_STEP = 2


class InstantManager:
    """Finishes every group at once; can fail at a task."""

    def __init__(self, fail_at=""):
        self.fail_at, self.launched = fail_at, []

    async def stream(self, tasks, *, global_step, resume=()):
        for task in tasks:
            if task.uid == self.fail_at:
                raise ValueError("no such tool")
            self.launched.append((task.uid, global_step))
            for number in range(2):
                record = Trajectory([1])
                record.add_action([2], [-0.5])
                yield EpisodeResult(
                    task=task,
                    rollout_n=number,
                    global_step=global_step,
                    status=Status.COMPLETED,
                    trajectories=(record,),
                    scores=(TrajectoryScore(value=float(number)),),
                )

    def abort(self):
        """Do nothing: no group takes long."""


def make_collector(manager, *, num_tasks=20):
    """Return a collector that was not started."""
    train = TrainConfig(mode="async", tasks_per_step=TASKS_PER_STEP, buffer=BufferConfig(max_staleness=0))
    tasks = [Task(messages=({"role": "user", "content": "?"},), uid=f"t{n}") for n in range(num_tasks)]
    buffer = TrajectoryBuffer(2, 4, max_staleness=0)
    stream = TaskStream(tasks, 0)
    return AsyncCollector.create(manager, stream, buffer, train, Interrupt(), lambda _episode: None)


def collect(collector, steps):
    """Collect the groups of some steps, with an update after each; return their tasks and steps."""
    found = []
    with collector.running():
        for step in steps:
            found += [(group.key[0], group.key[1]) for group in collector.collect(step)]
            collector.buffer.set_version(0)
            collector.notify()
    return found


def test_groups_have_the_step_for_which_they_were_launched():
    """The first `tasks_per_step` groups are for step 1, and so on: their seeds do not depend on timing."""
    assert [1, 1, 2, 2, 3, 3] == sorted(step for _uid, step in collect(make_collector(InstantManager()), (1, 2, 3)))


def test_a_resumed_collector_continues_with_the_next_tasks():
    """After a restart, groups in the buffer come first, then tasks and steps continue where they were."""
    manager = InstantManager()
    first = make_collector(manager)
    found = collect(first, (1, 2))
    second = make_collector(manager)
    second.buffer.load_state_dict(first.buffer.state_dict())
    second.load_state_dict(first.state_dict(), step=2)

    found += collect(second, (3, 4))

    assert len(manager.launched) == len(set(manager.launched))
    assert len(found) == len(set(found)) == 4 * TASKS_PER_STEP
    steps = [step for _uid, step in manager.launched]
    assert steps == [1 + place // TASKS_PER_STEP for place in range(len(steps))]


def test_a_state_of_mode_sync():
    """A checkpoint of mode `sync` has no count of launched groups; it follows from the number of steps."""
    collector = make_collector(InstantManager())
    state = {"stream": collector.producer.stream.state_dict(), "order": {"t1": 0}, "num_requests": 1}

    collector.load_state_dict(state, step=5)

    assert 5 * TASKS_PER_STEP == collector.producer.launched
    assert 6 == min(step for _uid, step in collect(collector, (6,)))


def test_a_failure_of_the_rollout_ends_the_training():
    """An exception in the rollout thread is raised where the trainer waits for groups."""
    collector = make_collector(InstantManager(fail_at="t3"), num_tasks=4)

    with pytest.raises(ValueError, match="no such tool"):
        collect(collector, range(1, 9))


def test_an_interrupt_ends_the_wait():
    """A request to stop is noticed although no group arrives."""
    collector = make_collector(InstantManager())
    collector.interrupt.requested = True

    with pytest.raises(TrainingInterruptedError):
        collector.collect(1)
    assert "wait" == collector.stage
