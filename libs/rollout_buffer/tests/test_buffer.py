"""The buffer returns whole groups, within its bounds of size and staleness, for any order of calls."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from turnwise import EpisodeResult, Status, Task, Trajectory, TrajectoryScore
from turnwise_result_files import TrajectoryWriter, read_results
from turnwise_rollout_buffer import BufferClosedError, EpisodeGroup, TrajectoryBuffer

GROUP_SIZE = 3
MAX_GROUPS = 4


def episode(uid, rollout_n, *, reward=0.0, version=0, step=1, status=Status.COMPLETED):
    """Return an episode with two sampled tokens."""
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
    """Compares puts, takes, updates and restarts in any order with a model that is a plain list."""

    def __init__(self):
        super().__init__()
        self.buffer = self.make_buffer()
        self.version, self.next_uid = 0, 0
        self.open: dict[str, tuple[int, list[float]]] = {}
        self.waiting: list[tuple[str, int]] = []

    def make_buffer(self):
        """Return an empty buffer."""
        return TrajectoryBuffer(GROUP_SIZE, MAX_GROUPS, max_staleness=1, dynamic_sampling=True)

    @rule(behind=st.integers(0, 3))
    def start_group(self, behind):
        """Start a group, sampled with current or older weights."""
        self.open[f"t{self.next_uid}"] = (max(0, self.version - behind), [])
        self.next_uid += 1

    @precondition(lambda self: self.open)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]))
    def put(self, data, reward):
        """Put the next episode of a group; without room it is refused, and can be put again."""
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
        """Take the oldest groups; all or none."""
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
    def update(self):
        """Raise the weight version: groups that are too stale are dropped."""
        self.version += 1
        self.buffer.set_version(self.version)
        self.waiting = [(uid, version) for uid, version in self.waiting if self.version - version <= 1]

    @rule()
    def restart(self):
        """Restore the state in a new buffer."""
        state = self.buffer.state_dict()
        self.buffer = self.make_buffer()
        self.buffer.load_state_dict(state)

    @invariant()
    def bounded(self):
        """The buffer has the groups of the model, and never more than `max_groups`."""
        assert len(self.waiting) == len(self.buffer) <= MAX_GROUPS


TestBufferMachine = BufferMachine.TestCase
TestBufferMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def full_group(uid, **options):
    """Return the episodes of one group, with different rewards."""
    return [episode(uid, number, reward=float(number), **options) for number in range(GROUP_SIZE)]


def test_put_waits_for_room():
    """Back-pressure: a `put` into a full buffer returns after a `take`."""
    buffer = TrajectoryBuffer(GROUP_SIZE, max_groups=1)
    for each in full_group("a"):
        buffer.put(each)
    putting = threading.Thread(target=lambda: [buffer.put(each) for each in full_group("b")])
    putting.start()

    first = buffer.take(1)
    second = buffer.take(1, timeout_s=600)
    putting.join()

    assert ["a", "b"] == [group.episodes[0].task.uid for group in (*first, *second)]


def test_closing_wakes_both_sides():
    """After `close`, a waiting `put` and a `take` without enough groups raise."""
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
    """With `stale: correct`, stale groups are kept, and their staleness is known."""
    buffer = TrajectoryBuffer(GROUP_SIZE, max_groups=2, max_staleness=0, stale="correct")
    for each in full_group("a", version=2):
        buffer.put(each)
    buffer.set_version(7)

    (group,) = buffer.take(1)

    assert 5 == buffer.staleness(group)
    assert 0 == buffer.counts["dropped_stale"]


def test_the_same_episode_twice_is_refused():
    """A group has one episode of each number; a second one is refused."""
    buffer = TrajectoryBuffer(GROUP_SIZE, max_groups=2)
    buffer.put(episode("a", 0))

    with pytest.raises(ValueError, match="already in the buffer"):
        buffer.put(episode("a", 0))
    assert buffer.put(episode("a", 0, step=2)) is False


def test_failed_episodes_make_no_variance():
    """The reward of a failed episode does not count as variance."""
    group = EpisodeGroup((episode("a", 0), episode("a", 1, reward=1.0, status=Status.FAILED)))

    assert not group.has_variance


def test_dataset():
    """The torch dataset yields groups until the buffer is closed."""
    from torch.utils.data import DataLoader

    buffer = TrajectoryBuffer(GROUP_SIZE, max_groups=4)
    for uid in "abc":
        for each in full_group(uid):
            buffer.put(each)
    buffer.close()

    batches = list(DataLoader(buffer.dataset(1), batch_size=None, num_workers=0))

    assert ["a", "b", "c"] == [groups[0].episodes[0].task.uid for groups in batches]


def test_the_state_survives_files(tmp_path):
    """Written to Parquet and restored, as in a checkpoint, a new buffer returns the same groups."""
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
    """Return a buffer with a group of each task."""
    buffer = TrajectoryBuffer(GROUP_SIZE, max_groups)
    for uid in uids:
        for each in full_group(uid):
            buffer.put(each)
    return buffer


@contextmanager
def waiting_put(buffer, last):
    """Put an episode from a thread, which has to wait for room; after the body it must have got it."""
    kept = []
    putting = threading.Thread(target=lambda: kept.append(buffer.put(last, timeout_s=600)))
    putting.start()
    while buffer.num_ahead <= buffer.max_groups:
        time.sleep(0.001)
    yield
    putting.join()
    assert [True] == kept


def test_the_same_last_episode_from_two_threads():
    """While a `put` waits for room, a second `put` of the same episode is refused."""
    buffer = full_buffer("a")
    first, second, third = full_group("b")
    buffer.put(first)
    buffer.put(second)

    with waiting_put(buffer, third):
        with pytest.raises(ValueError, match="already in the buffer"):
            buffer.put(third, timeout_s=600)
        buffer.take(1)

    assert [[0, 1, 2]] == [[each.rollout_n for each in group.episodes] for group in buffer.take(1)]


def test_an_episode_of_a_whole_group_is_refused():
    """An episode of a group that is in the buffer does not start the group again."""
    buffer = full_buffer("a")

    with pytest.raises(ValueError, match="already in the buffer"):
        buffer.put(full_group("a")[1])
    assert [] == buffer.state_dict()["partial"]


def test_a_refused_episode_can_be_put_again():
    """After a timeout the group is unchanged, and the episode can be put again."""
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


def test_a_waiting_group_is_in_the_state():
    """A group whose `put` still waits is saved, and does not exceed the bound after a restart."""
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
    """A smaller buffer shows only `max_groups` groups; the rest comes before new groups, and none is lost."""
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
    """A state saved with another `rollout.n` is refused; the message has both values."""
    buffer = TrajectoryBuffer(group_size=4, max_groups=2)
    for number in range(3):
        buffer.put(episode("a", number))
    other = TrajectoryBuffer(group_size=2, max_groups=2)

    with pytest.raises(ValueError, match=r"written with rollout\.n=4, but the config has rollout\.n=2"):
        other.load_state_dict(buffer.state_dict())
    assert [] == other.state_dict()["partial"]


def test_fewer_groups_when_others_had_no_variance():
    """Once enough groups were dropped for lack of variance, `take` returns the groups that there are."""
    buffer = TrajectoryBuffer(GROUP_SIZE, max_groups=4, dynamic_sampling=True)
    for each in full_group("a"):
        buffer.put(each)
    with pytest.raises(TimeoutError):
        buffer.take(2, timeout_s=0, uniform_limit=1)
    for number in range(GROUP_SIZE):
        buffer.put(episode("b", number))

    assert ["a"] == [group.episodes[0].task.uid for group in buffer.take(2, uniform_limit=1)]
    assert [] == buffer.take(2, uniform_limit=1)
