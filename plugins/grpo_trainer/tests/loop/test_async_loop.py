"""Mode `async` with fakes: no rollout is wasted, rollout and update overlap, and every step ends."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from structlog.testing import capture_logs

from turnwise import EpisodeResult, Status, Task, Trajectory, TrajectoryScore
from turnwise_grpo_trainer.build import build_loop
from turnwise_grpo_trainer.config import BufferConfig, EpisodesConfig, TrainConfig

TASKS_PER_STEP = 4
NUM_STEPS = 4
GROUP_SIZE = 2
TOO_MANY = 100


class Fake:
    """Manager and trainer in one: groups finish in the order in which they start; some only during an update."""

    chat = None

    def __init__(self, *, is_free=lambda _place: True, uniform=lambda _place: False, update_awaits=None):
        self.is_free, self.uniform, self.update_awaits = is_free, uniform, update_awaits
        self.version, self.num_started, self.num_finished, self.num_updates = 0, 0, 0, 0
        self.num_finished_in_update: list[int] = []

    def is_held(self, place):
        """Return whether a group waits for the update before its step to start."""
        return not self.is_free(place) and self.num_updates < place // TASKS_PER_STEP

    async def stream(self, tasks, *, global_step, resume=()):
        place, version = self.num_started, self.version
        self.num_started += 1
        assert place < TOO_MANY, "the rollout does not end"
        await asyncio.sleep(0.001)
        while self.is_held(place):  # noqa: ASYNC110 - the trainer's thread changes it, and sets no event of this loop
            await asyncio.sleep(0.001)
        self.num_finished += 1
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
        """Let all groups finish: their episodes end soon, so none is interrupted."""
        self.is_free = lambda _place: True

    def waiting_for(self, _part):
        return nullcontext()

    def collate(self, episodes):
        return episodes

    def update(self, batch, *, step, version, lr_factor):
        """Take long enough for the rollout to launch and finish all it may, or until so many groups have finished."""
        finished = self.num_finished
        self.num_updates += 1
        deadline = time.monotonic() + (0.1 if self.update_awaits is None else 600)
        while time.monotonic() < deadline and self.num_finished - finished != self.update_awaits:
            time.sleep(0.005)
        self.num_finished_in_update.append(self.num_finished - finished)
        return {"actor/trained_tokens": 1.0}

    def weights(self, *, adapters=False):
        return {}

    def update_weights(self, weights, *, version):
        self.version = version
        return SimpleNamespace(num_bytes=0)


def build_fake_loop(fake, tmp_path, **buffer):
    """Return a loop with fakes around it, which writes no checkpoints and no episodes."""
    train = TrainConfig(
        mode="async",
        num_steps=NUM_STEPS,
        tasks_per_step=TASKS_PER_STEP,
        buffer=BufferConfig(**buffer),
        episodes=EpisodesConfig(every=0),
    )
    tasks = [Task(messages=({"role": "user", "content": "?"},), uid=f"t{n}") for n in range(30)]
    run = SimpleNamespace(rollout=SimpleNamespace(seed=0))
    setup = SimpleNamespace(
        train=train, group_size=GROUP_SIZE, tasks=tasks, validation_tasks=[], shares=(), run=run, shares_devices=False
    )
    log = SimpleNamespace(out=tmp_path, write=lambda _step, _metrics: None)
    view = SimpleNamespace(
        warning=lambda _text: None,
        episode=lambda _episode: None,
        step=lambda _step, _metrics: None,
        activity=lambda _name: nullcontext(),
    )
    loop = build_loop(setup, fake, fake, log, view)
    loop.store = SimpleNamespace(save=lambda _training: None)
    return loop


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_no_group_is_rolled_out_to_be_dropped(tmp_path, bound):
    """If groups finish in the order in which they start, none is too stale to be trained on."""
    loop = build_fake_loop(Fake(), tmp_path, max_staleness=bound)

    loop.run()

    assert NUM_STEPS == loop.version
    assert NUM_STEPS * TASKS_PER_STEP == loop.buffer.counts["taken"]
    assert 0 == loop.buffer.counts["dropped_stale"]


def test_rollout_and_update_overlap(tmp_path):
    """With `max_staleness` 1, the next step's groups are rolled out during an update, and none is dropped."""
    fake = Fake(is_free=lambda place: place < TASKS_PER_STEP, update_awaits=TASKS_PER_STEP)
    loop = build_fake_loop(fake, tmp_path, max_staleness=1)

    loop.run()

    assert [TASKS_PER_STEP] * NUM_STEPS == fake.num_finished_in_update
    assert 0 == loop.buffer.counts["dropped_stale"]


def test_no_overlap_without_staleness(tmp_path):
    """With `max_staleness` 0, no group is launched during an update."""
    fake = Fake()
    loop = build_fake_loop(fake, tmp_path, max_staleness=0)

    loop.run()

    assert [0] * NUM_STEPS == fake.num_finished_in_update


def test_requests_for_groups_with_variance_are_bounded(tmp_path):
    """If all groups lack variance, a step requests no more tasks than mode `sync` would, and logs a warning."""
    loop = build_fake_loop(Fake(uniform=lambda _place: True), tmp_path, dynamic_sampling=True, max_refills=1)

    with capture_logs() as logs:
        loop.run()

    warnings = [log for log in logs if log["event"].startswith("step has fewer groups")]
    assert list(range(1, NUM_STEPS + 1)) == [log["step"] for log in warnings]
    assert all(log["log_level"] == "warning" and log["groups"] == 0 for log in warnings)
    assert all(log["dropped_uniform"] >= 2 * TASKS_PER_STEP for log in warnings)
    assert 0 == loop.version


def test_a_step_trains_on_the_groups_with_variance(tmp_path):
    """If refills do not yield enough groups, a step trains on fewer."""
    loop = build_fake_loop(Fake(uniform=lambda place: place % 10 > 0), tmp_path, dynamic_sampling=True, max_refills=1)

    with capture_logs() as logs:
        loop.run()

    groups = [log["groups"] for log in logs if "groups" in log]
    assert sum(groups) == loop.buffer.counts["taken"] > 0
    assert loop.version == sum(each > 0 for each in groups)


def test_without_dynamic_sampling_a_step_waits(tmp_path):
    """Without dynamic sampling, groups without variance count, and every step gets all of its groups."""
    loop = build_fake_loop(Fake(uniform=lambda _place: True), tmp_path, max_refills=0)

    with capture_logs() as logs:
        loop.run()

    assert NUM_STEPS * TASKS_PER_STEP == loop.buffer.counts["taken"]
    assert not [log for log in logs if "groups" in log]
