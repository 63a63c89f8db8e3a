"""Every pass has every task once, and a position is enough to resume."""

from __future__ import annotations

import json

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from turnwise import Task
from turnwise.errors import DataError
from turnwise_rollout_buffer.task_stream import Share, TaskStream

TASKS = [Task(messages=({"role": "user", "content": str(number)},), uid=str(number)) for number in range(7)]


def uids(tasks):
    """Return the uids of tasks."""
    return [task.uid for task in tasks]


def test_passes():
    """Each pass has all tasks, in a different order."""
    stream = TaskStream(TASKS, seed=0)
    first, second = uids(stream.take(7)), uids(stream.take(7))

    assert sorted(first) == sorted(second) == sorted(uids(TASKS))
    assert first != second


def test_a_step_has_no_task_twice():
    """Tasks of one `take` differ, also across the end of a pass, and excluded ones are skipped."""
    stream = TaskStream(TASKS, seed=0)
    stream.take(5)
    taken = uids(stream.take(5, without={"3"}))

    assert 5 == len(set(taken))
    assert "3" not in taken
    assert 6 == len(stream.take(9, without={"3"}))


def test_restart():
    """A restored stream returns the tasks that the original would return."""
    stream, other = TaskStream(TASKS, seed=3), TaskStream(TASKS, seed=3)
    stream.take(10)
    other.load_state_dict(stream.state_dict())

    assert uids(stream.take(6)) == uids(other.take(6))


def test_another_number_of_tasks():
    """A position in another number of tasks is refused; the message has both numbers."""
    stream = TaskStream(TASKS, seed=3)
    stream.take(5)
    with pytest.raises(DataError, match="the data set has 3 tasks, but the checkpoint was made with 7"):
        TaskStream(TASKS[:3], seed=3).load_state_dict(stream.state_dict())


def test_no_tasks():
    """A stream without tasks is refused."""
    with pytest.raises(DataError, match="no tasks to train on"):
        TaskStream([], seed=0)


@given(before=st.lists(st.integers(1, 9), max_size=6), after=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_a_resumed_stream_continues_anywhere(before, after):
    """After any number of tasks, also across passes, a restored stream returns the same tasks as the original."""
    stream, other = TaskStream(TASKS, seed=1), TaskStream(TASKS, seed=1)
    for num in before:
        stream.take(num)
    other.load_state_dict(stream.state_dict())

    assert [uids(stream.take(num)) for num in after] == [uids(other.take(num)) for num in after]


@given(num=st.integers(1, 40), excluded=st.sets(st.sampled_from("0123456"), max_size=6))
def test_tasks_come_equally_often(num, excluded):
    """Taken one by one, no task comes more than once more often than another; excluded tasks never come."""
    stream = TaskStream(TASKS, seed=2)
    counts = dict.fromkeys(set(uids(TASKS)) - excluded, 0)
    for _ in range(num):
        (uid,) = uids(stream.take(1, without=excluded))
        counts[uid] += 1  # a KeyError here is an excluded task

    assert max(counts.values()) - min(counts.values()) <= 1


def test_the_seed_decides_the_order():
    """Equal seeds have equal orders, and different seeds different ones."""
    orders = [tuple(uids(TaskStream(TASKS, seed=seed).take(7))) for seed in (0, 0, 1, 2, 3)]

    assert orders[0] == orders[1]
    assert len(set(orders)) > 2


def test_duplicate_uids_are_one_task():
    """Two rows with the same uid are not in the same step: their episodes would form one group."""
    stream = TaskStream([*TASKS, TASKS[0]], seed=0)

    for _ in range(4):
        taken = uids(stream.take(8))
        assert len(taken) == len(set(taken)) == 7


def make_mixture(sizes, weights, seed=0):
    """Return a stream of sources with these numbers of tasks; the uid of each starts with the source's number."""
    tasks = [
        Task(messages=({"role": "user", "content": "?"},), uid=f"{source}/{number}")
        for source, size in enumerate(sizes)
        for number in range(size)
    ]
    return TaskStream(tasks, seed, [Share(*each) for each in zip(sizes, weights, strict=True)])


mixtures = st.lists(st.tuples(st.integers(1, 30), st.sampled_from([0.1, 0.5, 1.0, 2.0, 7.0])), min_size=1, max_size=4)


@given(mixture=mixtures, num=st.integers(1, 60), seed=st.integers(0, 3))
def test_sources_come_by_weight(mixture, num, seed):
    """After any number of tasks, each source has its share of them up to one task for each other source."""
    sizes, weights = zip(*mixture, strict=True)
    stream = make_mixture(sizes, weights, seed)
    taken = [uid for _ in range(num) for uid in uids(stream.take(1))]

    for source, weight in enumerate(weights):
        count = sum(uid.startswith(f"{source}/") for uid in taken)
        assert abs(count - num * weight / sum(weights)) < len(weights)


@given(mixture=mixtures, num=st.integers(1, 200))
def test_each_source_is_passed_over_evenly(mixture, num):
    """Within a source, no task comes more than once more often than another."""
    sizes, weights = zip(*mixture, strict=True)
    stream = make_mixture(sizes, weights)
    counts = dict.fromkeys(uids(stream.tasks), 0)
    for _ in range(num):
        counts[uids(stream.take(1))[0]] += 1

    for source in range(len(sizes)):
        own = [count for uid, count in counts.items() if uid.startswith(f"{source}/")]
        assert max(own) - min(own) <= 1


@given(
    mixture=mixtures,
    before=st.lists(st.integers(1, 20), max_size=6),
    after=st.lists(st.integers(1, 20), min_size=1, max_size=4),
)
def test_a_mixture_is_resumed_exactly(mixture, before, after):
    """A restored mixture returns the tasks that the original would, through JSON, also after sources were exhausted."""
    sizes, weights = zip(*mixture, strict=True)
    stream, other = make_mixture(sizes, weights), make_mixture(sizes, weights)
    for num in before:
        stream.take(num)
    other.load_state_dict(json.loads(json.dumps(stream.state_dict())))

    assert [uids(stream.take(num)) for num in after] == [uids(other.take(num)) for num in after]


def test_a_small_source_leaves_its_place():
    """One call has no task twice, so others fill up for a source that is too small, which catches up afterwards."""
    stream = make_mixture([2, 9], [1, 1])

    first = uids(stream.take(8))
    assert 8 == len(set(first))
    assert 2 == sum(uid.startswith("0/") for uid in first)
    then = [uid[:2] for _ in range(6) for uid in uids(stream.take(1))]
    assert ["0/"] * 4 == then[:4]
    assert 11 == len(stream.take(20))


def test_another_mixture_is_refused():
    """Another number of sources, or of tasks in one of them, cannot continue a checkpoint."""
    state = make_mixture([3, 4], [1, 1]).state_dict()
    with pytest.raises(DataError, match="the data set has 1 sources, but the checkpoint was made with 2"):
        make_mixture([7], [1]).load_state_dict(state)
    with pytest.raises(DataError, match="the data set has 5 tasks, but the checkpoint was made with 4"):
        make_mixture([3, 5], [1, 1]).load_state_dict(state)


def test_weights_may_change_at_a_resume():
    """New weights hold for the whole stream: the source that they favour comes until it has its share."""
    stream, other = make_mixture([20, 20], [1, 1]), make_mixture([20, 20], [3, 1])
    stream.take(8)
    other.load_state_dict(stream.state_dict())

    assert ["0/"] * 8 == [uid[:2] for uid in uids(other.take(8))]


def test_a_source_without_tasks():
    """An empty source is refused: its weight could not be met."""
    with pytest.raises(DataError, match="no tasks to train on"):
        make_mixture([3, 0], [1, 1])


@pytest.mark.parametrize(
    "change",
    [{"messages": ({"role": "user", "content": "other"},)}, {"ground_truth": 1}, {"extra": {"a": 1}}, {"uid": "z"}],
    ids=["messages", "truth", "extra", "uid"],
)
def test_changed_tasks_are_refused(change):
    """A position means other tasks then, though their number is the same; so it does in another order."""
    stream = TaskStream(TASKS, seed=3)
    stream.take(2)
    for tasks in ([*TASKS[:-1], evolve(TASKS[-1], **change)], TASKS[::-1]):
        with pytest.raises(DataError, match="rows of the data set have changed since the checkpoint"):
            TaskStream(tasks, seed=3).load_state_dict(stream.state_dict())


def test_a_position_without_a_digest():
    """Earlier checkpoints have none; they are resumed as before."""
    stream = TaskStream(TASKS, seed=3)
    expected = stream.state_dict()
    for source in expected["sources"]:
        del source["digest"]
    stream.load_state_dict(expected)


@given(
    num_tasks=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    size=st.integers(1, 12),
    seed=st.integers(0, 5),
)
def test_interruptions_change_no_order(num_tasks, cuts, size, seed):
    """However often a stream is saved and restored, and over any number of passes, its tasks are the same."""
    tasks = [Task(messages=({"role": "user", "content": str(n)},), uid=str(n)) for n in range(num_tasks)]
    whole, resumed = TaskStream(tasks, seed), TaskStream(tasks, seed)
    for cut in cuts:
        for _ in range(cut):
            assert uids(whole.take(size)) == uids(resumed.take(size))
        state = json.loads(json.dumps(resumed.state_dict()))
        resumed = TaskStream(tasks, seed)
        resumed.load_state_dict(state)
    assert whole.state_dict() == resumed.state_dict()
