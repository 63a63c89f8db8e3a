"""Every pass has every task once, and a position is enough to resume."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise import Task
from turnwise.errors import DataError
from turnwise_rollout_buffer.task_stream import TaskStream

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
