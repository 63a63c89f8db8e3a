"""Episodes may be put before they are scored; their groups wait for the scores, and not for ever."""

from __future__ import annotations

import json
import threading

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from turnwise import EpisodeResult, Status, Task, Trajectory, TrajectoryScore
from turnwise_rollout_buffer import LateScores, TrajectoryBuffer

SIZE = 3


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def unscored(number, *, uid="a", step=1, status=Status.COMPLETED):
    """Return an episode without a score."""
    record = Trajectory([1, 2])
    record.add_action([3], [-0.5])
    task = Task(messages=({"role": "user", "content": "?"},), uid=uid)
    return EpisodeResult(task=task, rollout_n=number, global_step=step, status=status, trajectories=(record,))


def scored(number, reward=0.0):
    """Return an episode with a score."""
    return evolve(unscored(number), scores=(TrajectoryScore(value=reward),))


def make_buffer(clock=None, *, timeout_s=10.0, **options):
    """Return a buffer whose episodes wait for their scores."""
    return TrajectoryBuffer(SIZE, 4, late_scores=LateScores(timeout_s, clock or Clock()), **options)


def rewards(buffer):
    """Take a group and return the rewards of its episodes."""
    (group,) = buffer.take(1, timeout_s=0)
    return [each.reward for each in group.episodes]


@given(order=st.permutations([("put", n) for n in range(SIZE)] + [("score", n) for n in range(SIZE)]))
def test_a_group_is_whole_when_every_episode_is_there_and_scored(order):
    """In any order of puts and scores, the group is there after the last one; a score may come before its episode."""
    buffer, given_scores, num_put = make_buffer(), set(), 0
    for what, number in [*order, *(("score", n) for n in range(SIZE))]:
        assert (len(given_scores) == num_put == SIZE) == (buffer.qsize() == 1)
        if what == "put":
            num_put += 1
            assert buffer.put(unscored(number)) == (len(given_scores) == num_put == SIZE)
        else:
            assert buffer.notify_score("a", number, float(number)) == (number not in given_scores)
            given_scores.add(number)

    assert [0.0, 1.0, 2.0] == rewards(buffer)


def test_a_repeated_score_changes_nothing_and_another_one_is_refused():
    """The same score again is ignored, also after its group was taken; another value is an error."""
    buffer = make_buffer()
    assert 0 == buffer.put_batch(unscored(number) for number in range(SIZE))
    for number in range(SIZE):
        assert buffer.notify_score("a", number, 1.0)
        assert not buffer.notify_score("a", number, 1.0)
        with pytest.raises(ValueError, match=r"has the score 1\.0, and now gets another one, 2\.0"):
            buffer.notify_score("a", number, 2.0)

    assert [1.0] * SIZE == rewards(buffer)
    assert not buffer.notify_score("a", 0, 1.0)


def test_early_scores():
    """They need no waiting episodes, belong to one step, are checked like late ones, and survive a restart."""
    buffer = TrajectoryBuffer(SIZE, 4)
    for number in range(SIZE):
        assert buffer.notify_score("a", number, float(number), global_step=1)
        assert not buffer.notify_score("a", number, float(number), global_step=1)
    with pytest.raises(ValueError, match=r"has the score 0\.0, and now gets another one, 5\.0"):
        buffer.notify_score("a", 0, 5.0, global_step=1)
    other = TrajectoryBuffer(SIZE, 4)
    other.load_state_dict(json.loads(json.dumps(buffer.state_dict())))

    other.put_batch(unscored(number, step=2) for number in range(SIZE))
    assert [None, None, None] == rewards(other)
    other.put_batch(unscored(number) for number in range(SIZE))
    assert [0.0, 1.0, 2.0] == rewards(other)
    assert not other.notify_score("a", 1, 1.0, global_step=1)
    with pytest.raises(ValueError, match="it has one, or its deadline is over"):
        other.notify_score("a", 1, 1.0, global_step=2)


def test_the_deadline_of_a_score():
    """After the deadline an episode ends as not scored and its group is whole; a later score is refused."""
    clock = Clock()
    buffer = make_buffer(clock)
    buffer.put_batch([unscored(0), scored(1, 1.0), scored(2)])
    clock.now = 9.9
    assert (0, 1) == (buffer.qsize(), buffer.num_held)

    clock.now = 10.0

    with pytest.raises(ValueError, match="its deadline is over"):
        buffer.notify_score("a", 0, 1.0)
    assert [None, 1.0, 0.0] == rewards(buffer)


def test_deadlines_that_end_together():
    """Several episodes of a group may end as not scored at once."""
    clock = Clock()
    buffer = make_buffer(clock)
    buffer.put_batch(unscored(number) for number in range(SIZE))

    clock.now = 11.0

    assert [None] * SIZE == rewards(buffer)


def test_a_waiting_take_wakes_up_at_the_deadline():
    """A trainer that waits for a group gets it when the last score is overdue, without another call."""
    buffer = TrajectoryBuffer(SIZE, 4, late_scores=LateScores(0.05))
    taken = []
    taking = threading.Thread(target=lambda: taken.extend(buffer.take(1, timeout_s=600)))
    taking.start()
    buffer.put_batch(unscored(number) for number in range(SIZE))
    taking.join()

    assert [[None] * SIZE] == [[each.reward for each in group.episodes] for group in taken]


@pytest.mark.parametrize(
    "without", [unscored(0, status=Status.FAILED), evolve(unscored(0), trajectories=())], ids=["failed", "no tokens"]
)
def test_episodes_that_get_no_score_do_not_wait(without):
    """Nobody scores a failed episode, or one without tokens."""
    buffer = make_buffer()

    assert 1 == buffer.put_batch([without, scored(1), scored(2)])


def test_without_a_deadline_no_episode_waits():
    """By default an unscored episode is a finished one, as the reward may have been left out on purpose."""
    assert 1 == TrajectoryBuffer(SIZE, 4).put_batch(unscored(number) for number in range(SIZE))


def test_the_score_belongs_to_the_last_trajectory():
    """An episode of several trajectories has one score for each: 0 on all but the last."""
    buffer = make_buffer()
    first = unscored(0)
    buffer.put_batch([evolve(first, trajectories=first.trajectories * 3), scored(1), scored(2)])

    buffer.notify_score("a", 0, 2.0)

    (group,) = buffer.take(1, timeout_s=0)
    assert [0.0, 0.0, 2.0] == [score.value for score in group.episodes[0].scores]
    assert all(isinstance(score, TrajectoryScore) for score in group.episodes[0].scores)


def test_the_step_tells_equal_names_apart():
    """If a task waits at two steps, the score has to name the step."""
    buffer = make_buffer()
    for step in (1, 2):
        buffer.put_batch(unscored(number, step=step) for number in range(SIZE))
    with pytest.raises(ValueError, match="waits at several steps: name the global_step"):
        buffer.notify_score("a", 0, 1.0)

    for number in range(SIZE):
        assert buffer.notify_score("a", number, 1.0, global_step=2)

    (group,) = buffer.take(1, timeout_s=0)
    assert 2 == group.episodes[0].global_step


def test_groups_that_wait_are_bounded_and_kept():
    """A group that waits for scores counts as ahead of the trainer, is not discarded, and survives a restart."""
    buffer = make_buffer()
    buffer.put_batch(unscored(number) for number in range(SIZE))
    buffer.put_batch(unscored(number, uid="b") for number in range(SIZE - 1))
    for uid in "ab":
        buffer.discard((uid, 1, False))
    assert 1 == buffer.num_ahead
    with pytest.raises(ValueError, match="does not wait"):
        buffer.notify_score("b", 0, 1.0)

    other = make_buffer()
    other.load_state_dict(buffer.state_dict())
    for number in range(SIZE):
        other.notify_score("a", number, float(number))

    assert [0.0, 1.0, 2.0] == rewards(other)
    assert other.counts["added"] == other.counts["taken"] == 1


def test_uniform_scores_drop_the_group():
    """Dynamic sampling looks at the group when its last score arrives."""
    buffer = make_buffer(dynamic_sampling=True)
    buffer.put_batch(unscored(number) for number in range(SIZE))
    for number in range(SIZE):
        buffer.notify_score("a", number, 1.0)

    assert (0, 1) == (buffer.qsize(), buffer.counts["dropped_uniform"])
