"""Mode `async` with fakes: nothing is rolled out in vain, rollout and update overlap, and every step ends."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest
from structlog.testing import capture_logs

from turnwise import EpisodeResult, Status, Task, Trajectory, TrajectoryScore
from turnwise_grpo_trainer.async_loop import AsyncLoop
from turnwise_grpo_trainer.config import BufferConfig, TrainConfig

TASKS_PER_STEP = 4
NUM_STEPS = 4
GROUP_SIZE = 2
TOO_MANY = 100


class Fake:
    """Rollout and trainer in one: groups end in the order in which they begin, if asked only during an update."""

    def __init__(self, *, is_free=lambda _place: True, uniform=lambda _place: False, update_awaits=None):
        self.is_free, self.uniform, self.update_awaits = is_free, uniform, update_awaits
        self.version, self.num_begun, self.num_ended, self.num_updates_begun = 0, 0, 0, 0
        self.num_ended_in_update: list[int] = []

    def is_held(self, place):
        """Return whether a group waits for the update before its step to begin."""
        return not self.is_free(place) and self.num_updates_begun < place // TASKS_PER_STEP

    async def stream(self, tasks, *, global_step, resume=()):
        place, version = self.num_begun, self.version
        self.num_begun += 1
        assert place < TOO_MANY, "the rollout does not end"
        await asyncio.sleep(0.001)
        while self.is_held(place):  # noqa: ASYNC110 - the trainer's thread moves on, which sets no event of this loop
            await asyncio.sleep(0.001)
        self.num_ended += 1
        for task in tasks:
            for number in range(GROUP_SIZE):
                yield self.episode(task, number, global_step, version, reward=0.0 if self.uniform(place) else number)

    @staticmethod
    def episode(task, number, step, version, *, reward):
        record = Trajectory([1, 2])
        record.add_action([3], [-0.5], weight_version=np.array([version]))
        return EpisodeResult(
            task=task,
            rollout_n=number,
            global_step=step,
            status=Status.COMPLETED,
            trajectories=(record,),
            scores=(TrajectoryScore(value=float(reward)),),
        )

    def abort(self):
        """Nothing is cut: episodes end soon."""
        self.is_free = lambda _place: True

    def collate(self, episodes):
        return episodes

    def update(self, batch, *, step, version):
        """Take long enough for the rollout to begin and end whatever it may, or until it has ended so many groups."""
        ended = self.num_ended
        self.num_updates_begun += 1
        deadline = time.monotonic() + (0.1 if self.update_awaits is None else 30)
        while time.monotonic() < deadline and self.num_ended - ended != self.update_awaits:
            time.sleep(0.005)
        self.num_ended_in_update.append(self.num_ended - ended)
        return {"actor/trained_tokens": 1.0}

    def weights(self):
        return {}

    def update_weights(self, weights, *, version):
        self.version = version
        return SimpleNamespace(num_bytes=0)


class LoopWithoutCheckpoints(AsyncLoop):
    """Writes nothing."""

    def save(self):
        """Do nothing."""


def loop_of(fake, tmp_path, **buffer):
    """Return a loop with fakes around it."""
    train = TrainConfig(mode="async", num_steps=NUM_STEPS, tasks_per_step=TASKS_PER_STEP, buffer=BufferConfig(**buffer))
    tasks = [Task(messages=({"role": "user", "content": "?"},), uid=f"t{n}") for n in range(30)]
    run = SimpleNamespace(rollout=SimpleNamespace(seed=0))
    setup = SimpleNamespace(train=train, group_size=GROUP_SIZE, tasks=tasks, validation_tasks=[], run=run)
    log = SimpleNamespace(out=tmp_path, write=lambda _step, _numbers: None)
    view = SimpleNamespace(episode=lambda _episode: None, step=lambda _step, _numbers: None)
    return LoopWithoutCheckpoints.of(setup, fake, fake, log, view)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_nothing_is_rolled_out_to_be_dropped(tmp_path, bound):
    """Where groups end in the order in which they begin, none is too old when its turn comes."""
    loop = loop_of(Fake(), tmp_path, max_staleness=bound)

    loop.run()

    assert NUM_STEPS == loop.version
    assert NUM_STEPS * TASKS_PER_STEP == loop.buffer.counts["taken"]
    assert 0 == loop.buffer.counts["dropped_stale"]


def test_rollout_and_update_overlap(tmp_path):
    """With a bound of 1, the groups of the next step are rolled out during an update, and none is dropped."""
    fake = Fake(is_free=lambda place: place < TASKS_PER_STEP, update_awaits=TASKS_PER_STEP)
    loop = loop_of(fake, tmp_path, max_staleness=1)

    loop.run()

    assert [TASKS_PER_STEP] * NUM_STEPS == fake.num_ended_in_update
    assert 0 == loop.buffer.counts["dropped_stale"]


def test_no_overlap_without_staleness(tmp_path):
    """With a bound of 0 nothing is begun while the trainer learns."""
    fake = Fake()
    loop = loop_of(fake, tmp_path, max_staleness=0)

    loop.run()

    assert [0] * NUM_STEPS == fake.num_ended_in_update


def test_groups_without_variance_come_to_an_end(tmp_path):
    """When all groups are dropped for no variance, a step asks for no more than `sync` would, and says so."""
    loop = loop_of(Fake(uniform=lambda _place: True), tmp_path, dynamic_sampling=True, max_refills=1)

    with capture_logs() as logs:
        loop.run()

    said = [log for log in logs if log["event"].startswith("a step goes on with fewer groups")]
    assert list(range(1, NUM_STEPS + 1)) == [log["step"] for log in said]
    assert all(log["log_level"] == "warning" and log["groups"] == 0 for log in said)
    assert all(log["dropped_uniform"] >= 2 * TASKS_PER_STEP for log in said)
    assert 0 == loop.version


def test_a_step_takes_what_has_variance(tmp_path):
    """When refills do not help, a step learns from the groups that there are."""
    loop = loop_of(Fake(uniform=lambda place: place % 10 > 0), tmp_path, dynamic_sampling=True, max_refills=1)

    with capture_logs() as logs:
        loop.run()

    groups = [log["groups"] for log in logs if "groups" in log]
    assert sum(groups) == loop.buffer.counts["taken"] > 0
    assert loop.version == sum(each > 0 for each in groups)


def test_without_dynamic_sampling_a_step_waits(tmp_path):
    """Groups without variance are learnt from where they are not dropped, and every step has all of its groups."""
    loop = loop_of(Fake(uniform=lambda _place: True), tmp_path, max_refills=0)

    with capture_logs() as logs:
        loop.run()

    assert NUM_STEPS * TASKS_PER_STEP == loop.buffer.counts["taken"]
    assert not [log for log in logs if "groups" in log]
