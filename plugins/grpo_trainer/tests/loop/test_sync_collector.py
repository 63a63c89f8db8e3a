"""The collector of mode `sync` returns reproducible groups, and loses no episode when it is interrupted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise import EpisodeResult, Status, Task, TrajectoryScore, UnfinishedEpisode
from turnwise.errors import EngineError
from turnwise.record.spec import EpisodeSpec
from turnwise_grpo_trainer.config import BufferConfig, TrainConfig
from turnwise_grpo_trainer.loop.interrupts import Interrupt, TrainingInterruptedError
from turnwise_grpo_trainer.loop.sync_collector import SyncCollector
from turnwise_rollout_buffer.buffer import TrajectoryBuffer
from turnwise_rollout_buffer.task_stream import TaskStream

UIDS = [f"t{number}" for number in range(9)]
GROUP_SIZE = 2
TASKS_PER_STEP = 3


class FakeManager:
    """Finishes episodes in a given order; tasks in `uniform` have equal rewards; `dropped` episodes never end."""

    def __init__(self, *, order=lambda specs: specs, uniform=(), dropped=()):
        self.order, self.uniform, self.dropped = order, uniform, dropped
        self.requests, self.finished = [], []
        self.interrupt, self.left = Interrupt(), -1

    def interrupt_after(self, num_episodes):
        """Interrupt the training once so many more episodes have finished; a negative number never does."""
        self.left = num_episodes

    def iterate(self, tasks, *, global_step, resume=()):
        self.requests.append([task.uid for task in tasks])
        new = [(task, number) for task in tasks for number in range(GROUP_SIZE)]
        specs = [EpisodeSpec(task=t, agent_name="a", rollout_n=n, global_step=global_step) for t, n in new]
        specs = [spec for spec in specs if spec.uid not in self.dropped]
        for spec in self.order([*(each.spec for each in resume), *specs]):
            self.interrupt.requested = self.interrupt.requested or self.left == 0
            if self.interrupt.requested:
                yield self.result(spec, status=Status.ABORTED, unfinished=UnfinishedEpisode(spec=spec))
            else:
                self.left -= 1
                self.finished.append(f"{spec.uid} of {spec.global_step}")
                yield self.result(spec, scores=(TrajectoryScore(value=self.reward(spec)),))

    def reward(self, spec):
        return 0.0 if spec.task.uid in self.uniform else float(spec.rollout_n)

    @staticmethod
    def result(spec, *, status=Status.COMPLETED, **options):
        return EpisodeResult(
            task=spec.task, rollout_n=spec.rollout_n, global_step=spec.global_step, status=status, **options
        )


def make_collector(manager, *, num_tasks=9, **buffer):
    """Return a collector over tasks `t0`, `t1`, ... around a manager."""
    train = TrainConfig(tasks_per_step=TASKS_PER_STEP, buffer=BufferConfig(**buffer))
    tasks = [Task(messages=({"role": "user", "content": "?"},), uid=f"t{n}") for n in range(num_tasks)]
    groups = TrajectoryBuffer(GROUP_SIZE, 2 * TASKS_PER_STEP, dynamic_sampling=train.buffer.dynamic_sampling)
    manager.interrupt = Interrupt()
    return SyncCollector(manager, TaskStream(tasks, 0), groups, train, manager.interrupt, lambda _episode: None)


def restart(collector, manager, step, **buffer):
    """Return a collector in another process, from the state of this one."""
    other = make_collector(manager, **buffer)
    other.buffer.load_state_dict(collector.buffer.state_dict())
    other.load_state_dict(collector.state_dict(), step=step)
    other.load_partial(collector.unfinished)
    return other


def names(groups):
    """Return the episodes of groups."""
    return [[f"{each.uid} of {each.global_step}" for each in group.episodes] for group in groups]


@given(permutation=st.permutations(range(GROUP_SIZE * TASKS_PER_STEP)))
def test_groups_do_not_depend_on_the_order_of_episodes(permutation):
    """Whichever episode finishes first, a step has the same groups in the same order."""
    shuffled = FakeManager(order=lambda specs: [specs[index] for index in permutation])

    assert names(make_collector(shuffled).collect(1)) == names(make_collector(FakeManager()).collect(1))


@given(kills=st.lists(st.integers(0, 8), max_size=6), uniform=st.sets(st.sampled_from(UIDS), max_size=4))
def test_interrupts_lose_and_repeat_nothing(kills, uniform):
    """
    Interrupted after any numbers of episodes and resumed, three steps have the groups of an undisturbed training.

    Dynamic sampling drops some groups, and requests as many tasks as without interrupts. Episodes finish in reverse.
    """
    buffer = {"dynamic_sampling": True, "max_refills": 1}
    order = {"order": lambda specs: specs[::-1], "uniform": uniform}
    quiet = FakeManager(**order)
    undisturbed = make_collector(quiet, **buffer)
    expected = [names(undisturbed.collect(step)) for step in (1, 2, 3)]
    manager = FakeManager(**order)
    collector, collected, waits = make_collector(manager, **buffer), [], iter(kills)
    manager.interrupt_after(next(waits, -1))

    while len(collected) < 3:
        try:
            collected.append(names(collector.collect(len(collected) + 1)))
        except TrainingInterruptedError:
            collector = restart(collector, manager, len(collected), **buffer)
            manager.interrupt_after(next(waits, -1))

    assert expected == collected
    assert sorted(quiet.finished) == sorted(manager.finished)
    assert [request for request in manager.requests if request] == quiet.requests


def test_refills_replace_groups_without_variance():
    """With dynamic sampling, each refill requests as many tasks as are missing, and never one of the step again."""
    first = names(make_collector(FakeManager()).collect(1))
    uniform = {group[0].partition("/")[0] for group in first[:2]}
    manager = FakeManager(uniform=uniform)
    collector = make_collector(manager, dynamic_sampling=True)

    groups = collector.collect(1)

    assert TASKS_PER_STEP == len(groups)
    assert [3, 2] == [len(request) for request in manager.requests]
    requested = [uid for request in manager.requests for uid in request]
    assert 5 == len(set(requested))
    assert [uid for uid in requested if uid not in uniform] == [group.episodes[0].task.uid for group in groups]
    assert 2 == collector.buffer.counts["dropped_uniform"]


def test_refills_are_bounded():
    """If no group has variance, a step makes `max_refills` more requests, and returns no group."""
    everything = {f"t{number}" for number in range(30)}
    manager = FakeManager(uniform=everything)
    collector = make_collector(manager, num_tasks=30, dynamic_sampling=True, max_refills=2)

    assert [] == collector.collect(1)
    assert [3, 3, 3] == [len(request) for request in manager.requests]
    collector.collect(2)
    assert 6 == len(manager.requests)


def test_a_step_ends_when_the_tasks_are_used_up():
    """With fewer tasks than a refill needs, a step continues with the groups that there are."""
    manager = FakeManager(uniform={"t0", "t1"})
    collector = make_collector(manager, num_tasks=4, dynamic_sampling=True, max_refills=9)

    groups = collector.collect(1)

    assert {"t2", "t3"} == {group.episodes[0].task.uid for group in groups}
    assert 4 == sum(map(len, manager.requests))


@pytest.mark.parametrize("dropped", [{"t0/0", "t0/1"}, {"t0/1"}], ids=["the whole group", "a part"])
def test_incomplete_groups_leave_no_episodes(dropped):
    """A group that misses episodes is not returned, and its other episodes do not stay in the buffer."""
    manager = FakeManager(dropped=dropped)
    collector = make_collector(manager, num_tasks=3)

    assert [2, 2] == [len(collector.collect(step)) for step in (1, 2)]
    assert [] == collector.buffer.state_dict()["partial"]


def test_an_interrupt_between_steps():
    """A request to stop is noticed before the next rollout starts."""
    manager = FakeManager()
    collector = make_collector(manager)
    collector.collect(1)
    manager.interrupt.requested = True

    with pytest.raises(TrainingInterruptedError):
        collector.collect(2)
    assert 1 == len(manager.requests)


def test_a_state_of_mode_async():
    """The position in the tasks is taken over; the rest of that state belongs to no particular step."""
    manager = FakeManager()
    collector = make_collector(manager)
    collector.collect(1)
    state = {"stream": collector.stream.state_dict(), "launched": 3}
    other = make_collector(FakeManager())

    other.load_state_dict(state, step=1)

    assert names(other.collect(2)) == names(collector.collect(2))


def test_nothing_runs_between_steps():
    """Outside of `collect` there is nothing to start, pause or notify, and pausing keeps the unfinished episodes."""
    collector = make_collector(FakeManager())
    unfinished = UnfinishedEpisode(spec=EpisodeSpec(task=collector.stream.tasks[0], agent_name="a"))
    collector.load_partial([unfinished])

    with collector.running(), collector.paused():
        collector.notify()
        collector.interrupt_soon()
        assert (unfinished,) == collector.unfinished
    assert "rollout" == collector.stage


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_step_that_failed_is_collected_again(num_before):
    """From the state of a checkpoint, the same groups; those of the steps before are not repeated."""

    def fail_after_three(specs):
        yield from specs[:3]
        raise EngineError("lost")

    manager = FakeManager()
    collector = make_collector(manager)
    for step in range(1, num_before + 1):
        collector.collect(step)
    manager.order = fail_after_three
    with pytest.raises(EngineError):
        collector.collect(num_before + 1)
    assert collector.buffer.state_dict()["partial"]
    manager.order = lambda specs: specs
    collector.undo_collect()
    assert [] == collector.buffer.state_dict()["partial"]

    other = restart(collector, manager, num_before)

    assert names(other.collect(num_before + 1)) == names(collector.collect(num_before + 1))
    assert manager.requests[-1] == manager.requests[-2] == manager.requests[num_before]


class ImpatientBuffer(TrajectoryBuffer):
    """Raises an error where a buffer would wait: in mode `sync` nobody else takes groups, so that has no end."""

    def put(self, episode, *, timeout_s=0.0):
        return super().put(episode, timeout_s=timeout_s)


@given(
    num_waiting=st.integers(0, 2 * TASKS_PER_STEP + 1),
    num_half=st.integers(0, 5),
    num_begun=st.integers(0, 5),
    kills=st.lists(st.integers(0, 8), max_size=4),
)
def test_a_full_checkpoint_of_mode_async(num_waiting, num_half, num_begun, kills):
    """
    It may have any number of whole, half and begun groups. Sync steps train on each once, and none waits for room.

    There may be more whole groups than fit, because a `put` of mode `async` may have waited for room.
    """
    uids = [f"u{number}" for number in range(num_waiting + num_half + num_begun)]
    specs = [
        [
            EpisodeSpec(task=Task(messages=({"role": "user", "content": "?"},), uid=uid), agent_name="a", rollout_n=n)
            for n in range(GROUP_SIZE)
        ]
        for uid in uids
    ]
    done = [spec for group in specs[:num_waiting] for spec in group]
    done += [group[0] for group in specs[num_waiting : num_waiting + num_half]]
    unfinished = [UnfinishedEpisode(spec=spec) for group in specs for spec in group if spec not in done]
    manager = FakeManager()
    large = TrajectoryBuffer(GROUP_SIZE, len(uids) + 1)
    for spec in done:
        large.put(manager.result(spec, scores=(TrajectoryScore(value=manager.reward(spec)),)))
    collector = make_collector(manager, num_tasks=9)
    collector.buffer = ImpatientBuffer(GROUP_SIZE, 2 * TASKS_PER_STEP)
    collector.buffer.load_state_dict(large.state_dict())
    collector.load_partial(unfinished)
    waits, collected = iter(kills), []
    manager.interrupt_after(next(waits, -1))

    while not set(uids) <= {group.episodes[0].task.uid for group in collected}:
        try:
            groups = collector.collect(len(collected) // TASKS_PER_STEP + 1)
        except TrainingInterruptedError:
            state, partial = collector.buffer.state_dict(), collector.unfinished
            stream = collector.state_dict()
            collector = make_collector(manager, num_tasks=9)
            collector.buffer = ImpatientBuffer(GROUP_SIZE, 2 * TASKS_PER_STEP)
            collector.buffer.load_state_dict(state)
            collector.load_state_dict(stream, step=len(collected) // TASKS_PER_STEP)
            collector.load_partial(partial)
            manager.interrupt_after(next(waits, -1))
        else:
            assert len(groups) == TASKS_PER_STEP
            collected += groups
    episodes = [name for group in names(collected) for name in group]
    assert len(episodes) == len(set(episodes))
