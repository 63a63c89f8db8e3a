"""Every pass has every task once, and a place is enough to go on."""

from __future__ import annotations

import pytest

from turnwise import Task
from turnwise.errors import DataError
from turnwise_grpo_trainer.task_stream import TaskStream

TASKS = [Task(messages=({"role": "user", "content": str(number)},), uid=str(number)) for number in range(7)]


def uids(tasks):
    """Return the names of tasks."""
    return [task.uid for task in tasks]


def test_passes():
    """Each pass is another order of all."""
    stream = TaskStream(TASKS, seed=0)
    first, second = uids(stream.take(7)), uids(stream.take(7))

    assert sorted(first) == sorted(second) == sorted(uids(TASKS))
    assert first != second


def test_a_step_has_no_task_twice():
    """Not over the end of a pass, and not one that is ruled out; fewer when there are no more."""
    stream = TaskStream(TASKS, seed=0)
    stream.take(5)
    taken = uids(stream.take(5, without={"3"}))

    assert 5 == len(set(taken))
    assert "3" not in taken
    assert 6 == len(stream.take(9, without={"3"}))


def test_restart():
    """The same tasks follow."""
    stream, other = TaskStream(TASKS, seed=3), TaskStream(TASKS, seed=3)
    stream.take(10)
    other.load_state_dict(stream.state_dict())

    assert uids(stream.take(6)) == uids(other.take(6))


def test_another_number_of_tasks():
    """A place among others is none."""
    stream = TaskStream(TASKS, seed=3)
    stream.take(5)
    with pytest.raises(DataError, match="there are 3 tasks, and the training to go on with has 7"):
        TaskStream(TASKS[:3], seed=3).load_state_dict(stream.state_dict())


def test_no_tasks():
    """There is nothing to train on."""
    with pytest.raises(DataError):
        TaskStream([], seed=0)
