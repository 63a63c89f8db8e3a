"""The buffer hands out whole groups, bounded and fresh, whatever the order in which things happen."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from turnwise import EpisodeResult, Status, Task, Trajectory, TrajectoryScore, TrajectoryWriter, read_results
from turnwise_grpo_trainer.buffer import BufferClosedError, EpisodeGroup, TrajectoryBuffer

GROUP_SIZE = 3
MAX_GROUPS = 4


def episode(uid, rollout_n, *, reward=0.0, version=0, step=1, status=Status.COMPLETED):
    """Return an episode of one sampled token."""
    record = Trajectory([1, 2])
    record.add_action([3, 4], [-0.5, -0.25], weight_version=np.array([version, version + 1]))
    return EpisodeResult(
        task=Task(messages=({"role": "user", "content": "?"},), uid=uid),
        rollout_n=rollout_n,
        global_step=step,
        status=status,
        trajectories=(record,),
        scores=(TrajectoryScore(value=reward),),
    )


class BufferMachine(RuleBasedStateMachine):
    """Puts, takes, versions and restarts in any order, against a model that is a plain list."""

    def __init__(self):
        super().__init__()
        self.buffer = self.made()
        self.version, self.next_uid = 0, 0
        self.open: dict[str, tuple[int, list[float]]] = {}
        self.waiting: list[tuple[str, int]] = []

    def made(self):
        """Return an empty buffer."""
        return TrajectoryBuffer(GROUP_SIZE, MAX_GROUPS, max_staleness=1, dynamic_sampling=True)

    @rule(behind=st.integers(0, 3))
    def begin(self, behind):
        """Begin a group, sampled by older weights or by the trainer's."""
        self.open[f"t{self.next_uid}"] = (max(0, self.version - behind), [])
        self.next_uid += 1

    @precondition(lambda self: self.open)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]))
    def put(self, data, reward):
        """Put the next episode of a group; one that finds no room is not lost and not kept."""
        uid = data.draw(st.sampled_from(sorted(self.open)))
        version, rewards = self.open[uid]
        whole, differ = len(rewards) == GROUP_SIZE - 1, len({*rewards, reward}) > 1
        new = episode(uid, len(rewards), reward=reward, version=version)
        if whole and differ and len(self.waiting) == MAX_GROUPS:
            with pytest.raises(TimeoutError):
                self.buffer.put(new, timeout_s=0)
            return
        fresh = self.version - version <= 1
        assert (whole and differ and fresh) == self.buffer.put(new, timeout_s=0)
        rewards.append(reward)
        if whole:
            del self.open[uid]
            if differ and fresh:
                self.waiting.append((uid, version))

    @rule(num=st.integers(1, MAX_GROUPS))
    def take(self, num):
        """Take the oldest groups, all or none."""
        if num > len(self.waiting):
            with pytest.raises(TimeoutError):
                self.buffer.take(num, timeout_s=0)
            return
        groups = self.buffer.take(num, timeout_s=0)
        assert [uid for uid, _ in self.waiting[:num]] == [group.episodes[0].task.uid for group in groups]
        for group in groups:
            assert list(range(GROUP_SIZE)) == [each.rollout_n for each in group.episodes]
            assert 1 == len({each.task.uid for each in group.episodes})
            assert group.has_variance
            assert self.buffer.staleness(group) <= 1
        del self.waiting[:num]

    @rule()
    def learn(self):
        """Raise the version: what is too old goes."""
        self.version += 1
        self.buffer.set_version(self.version)
        self.waiting = [(uid, version) for uid, version in self.waiting if self.version - version <= 1]

    @rule()
    def restart(self):
        """Go on in another object."""
        state = self.buffer.state_dict()
        self.buffer = self.made()
        self.buffer.load_state_dict(state)

    @invariant()
    def bounded(self):
        """Never more than fit, and all that the model has."""
        assert len(self.waiting) == len(self.buffer) <= MAX_GROUPS


TestBufferMachine = BufferMachine.TestCase
TestBufferMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def full_group(uid, **options):
    """Return episodes of one group whose rewards differ."""
    return [episode(uid, number, reward=float(number), **options) for number in range(GROUP_SIZE)]


def test_put_waits_for_room():
    """Back-pressure: the rollout goes on when the trainer has taken something."""
    buffer = TrajectoryBuffer(GROUP_SIZE, max_groups=1)
    for each in full_group("a"):
        buffer.put(each)
    putting = threading.Thread(target=lambda: [buffer.put(each) for each in full_group("b")])
    putting.start()

    first = buffer.take(1)
    second = buffer.take(1, timeout_s=30)
    putting.join()

    assert ["a", "b"] == [group.episodes[0].task.uid for group in (*first, *second)]


def test_closing_wakes_both_sides():
    """Neither waits for what will not come."""
    buffer = TrajectoryBuffer(GROUP_SIZE, max_groups=1)
    for each in full_group("a"):
        buffer.put(each)
    errors = []

    def put():
        first, second, third = full_group("b")
        buffer.put(first)
        buffer.put(second)
        with pytest.raises(BufferClosedError) as caught:
            buffer.put(third)
        errors.append(caught.value)

    putting = threading.Thread(target=put)
    putting.start()
    buffer.close()
    putting.join()

    assert 1 == len(errors)
    assert 1 == len(buffer.take(1))
    with pytest.raises(BufferClosedError):
        buffer.take(1)


def test_stale_groups_may_be_kept():
    """With `correct` they go through, and their age can be asked."""
    buffer = TrajectoryBuffer(GROUP_SIZE, max_groups=2, max_staleness=0, stale="correct")
    for each in full_group("a", version=2):
        buffer.put(each)
    buffer.set_version(7)

    (group,) = buffer.take(1)

    assert 5 == buffer.staleness(group)
    assert 0 == buffer.counts["dropped_stale"]


def test_the_same_episode_twice_is_refused():
    """A group has one episode of each number."""
    buffer = TrajectoryBuffer(GROUP_SIZE, max_groups=2)
    buffer.put(episode("a", 0))

    with pytest.raises(ValueError, match="in the buffer already"):
        buffer.put(episode("a", 0))
    assert buffer.put(episode("a", 0, step=2)) is False


def test_failed_episodes_make_no_variance():
    """A reward that says nothing about the policy does not save a group."""
    group = EpisodeGroup((episode("a", 0), episode("a", 1, reward=1.0, status=Status.FAILED)))

    assert not group.has_variance


def test_dataset():
    """torch's face of it ends when the buffer is closed."""
    from torch.utils.data import DataLoader

    buffer = TrajectoryBuffer(GROUP_SIZE, max_groups=4)
    for uid in "abc":
        for each in full_group(uid):
            buffer.put(each)
    buffer.close()

    batches = list(DataLoader(buffer.dataset(1), batch_size=None, num_workers=0))

    assert ["a", "b", "c"] == [groups[0].episodes[0].task.uid for groups in batches]


def test_what_waits_survives_a_file(tmp_path):
    """As a checkpoint writes it: the same groups come out of a new buffer."""
    buffer = TrajectoryBuffer(GROUP_SIZE, max_groups=4)
    for each in [*full_group("a", version=3), *full_group("b")[:2]]:
        buffer.put(each)
    state = buffer.state_dict()
    for name in ("waiting", "partial"):
        with TrajectoryWriter(tmp_path / f"{name}.parquet") as writer:
            for each in state[name]:
                writer.write(each)
        state[name] = read_results(tmp_path / f"{name}.parquet")
    other = TrajectoryBuffer(GROUP_SIZE, max_groups=4)
    other.load_state_dict(state)

    other.put(full_group("b")[2])
    groups = other.take(2)

    assert ["a", "b"] == [group.episodes[0].task.uid for group in groups]
    assert [3, 0] == [group.oldest_version for group in groups]
    assert [[0.0, 1.0, 2.0]] * 2 == [[each.reward for each in group.episodes] for group in groups]


def full_buffer(*uids, max_groups=1):
    """Return a buffer of groups of these tasks."""
    buffer = TrajectoryBuffer(GROUP_SIZE, max_groups)
    for uid in uids:
        for each in full_group(uid):
            buffer.put(each)
    return buffer


@contextmanager
def waiting_put(buffer, last):
    """Put an episode in a thread, which must wait for room; at the end it must have found some."""
    kept = []
    putting = threading.Thread(target=lambda: kept.append(buffer.put(last, timeout_s=30)))
    putting.start()
    while buffer.num_ahead <= buffer.max_groups:
        time.sleep(0.001)
    yield
    putting.join()
    assert [True] == kept


def test_the_same_last_episode_from_two_threads():
    """While the one that completes a group waits for room, another `put` of it is refused."""
    buffer = full_buffer("a")
    first, second, third = full_group("b")
    buffer.put(first)
    buffer.put(second)

    with waiting_put(buffer, third):
        with pytest.raises(ValueError, match="in the buffer already"):
            buffer.put(third, timeout_s=30)
        buffer.take(1)

    assert [[0, 1, 2]] == [[each.rollout_n for each in group.episodes] for group in buffer.take(1)]


def test_an_episode_of_a_whole_group_is_refused():
    """It does not begin the group a second time."""
    buffer = full_buffer("a")

    with pytest.raises(ValueError, match="in the buffer already"):
        buffer.put(full_group("a")[1])
    assert [] == buffer.state_dict()["partial"]


def test_an_episode_that_found_no_room_may_be_put_again():
    """Its group is as it was, and so is the state."""
    buffer = full_buffer("a")
    *others, last = full_group("b")
    for each in others:
        buffer.put(each)

    with pytest.raises(TimeoutError):
        buffer.put(last, timeout_s=0)
    assert others == buffer.state_dict()["partial"]
    buffer.take(1)
    assert buffer.put(last)
    assert {"added": 2, "taken": 1, "dropped_uniform": 0, "dropped_stale": 0} == buffer.counts


def test_what_waits_for_room_is_in_the_state():
    """A group whose `put` has not returned is not lost, and does not go over the bound after a restart."""
    buffer = full_buffer("a")
    *others, last = full_group("b")
    for each in others:
        buffer.put(each)
    with waiting_put(buffer, last):
        state = buffer.state_dict()
        buffer.take(1)
    other = TrajectoryBuffer(GROUP_SIZE, max_groups=1)
    other.load_state_dict(state)

    assert 1 == len(other)
    taken = [*other.take(1, timeout_s=0), *other.take(1, timeout_s=0)]
    assert ["a", "b"] == [group.episodes[0].task.uid for group in taken]
    assert other.counts["added"] == other.counts["taken"] == 2


def test_a_state_of_a_larger_buffer():
    """No more groups wait than the smaller one holds, nothing finds room before they do, and none is lost."""
    other = TrajectoryBuffer(GROUP_SIZE, max_groups=2)
    other.load_state_dict(full_buffer(*"abcd", max_groups=4).state_dict())

    assert 2 == len(other)
    *others, last = full_group("e")
    for each in others:
        other.put(each)
    with pytest.raises(TimeoutError):
        other.put(last, timeout_s=0)
    taken = [*other.take(2), *other.take(2, timeout_s=0)]
    assert ["a", "b", "c", "d"] == [group.episodes[0].task.uid for group in taken]


def test_a_state_of_another_group_size_is_refused():
    """What was saved with another `rollout.n` makes no groups here, and the message says so."""
    buffer = TrajectoryBuffer(group_size=4, max_groups=2)
    for number in range(3):
        buffer.put(episode("a", number))
    other = TrajectoryBuffer(group_size=2, max_groups=2)

    with pytest.raises(ValueError, match=r"have 4 episodes, and here they have 2: rollout\.n"):
        other.load_state_dict(buffer.state_dict())
    assert [] == other.state_dict()["partial"]


def test_fewer_groups_when_others_had_no_variance():
    """One who waits takes what there is once enough groups were dropped."""
    buffer = TrajectoryBuffer(GROUP_SIZE, max_groups=4, dynamic_sampling=True)
    for each in full_group("a"):
        buffer.put(each)
    with pytest.raises(TimeoutError):
        buffer.take(2, timeout_s=0, until_uniform=1)
    for number in range(GROUP_SIZE):
        buffer.put(episode("b", number))

    assert ["a"] == [group.episodes[0].task.uid for group in buffer.take(2, until_uniform=1)]
    assert [] == buffer.take(2, until_uniform=1)
