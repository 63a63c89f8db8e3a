"""Each mode of training gets its parts, configured by the `train` section."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from turnwise.errors import ConfigError
from turnwise_grpo_trainer import processes
from turnwise_grpo_trainer.build import build_buffer, build_learner_spec, build_loop, build_trainer
from turnwise_grpo_trainer.loop.async_collector import AsyncCollector
from turnwise_grpo_trainer.loop.sync_collector import SyncCollector
from turnwise_grpo_trainer.loop.weight_sync import DirectSync, HybridSync
from turnwise_grpo_trainer.processes.trainers import LocalTrainer
from turnwise_grpo_trainer.train_setup import read_setup

EXAMPLE = str(Path(__file__).parents[3] / "examples/train_calculator.yaml")


def read(*overrides):
    """Return the setup of the example."""
    return read_setup(EXAMPLE, ("train.policy.device=cpu", *overrides))


def build(setup, out):
    """Return a loop around fakes."""
    view = SimpleNamespace(episode=lambda _episode: None)
    return build_loop(setup, SimpleNamespace(chat=None), SimpleNamespace(), SimpleNamespace(out=out), view)


def test_the_buffer_has_room_for_two_steps():
    """Without `max_groups` the buffer has room for two steps; the other options come from the config."""
    assert 2 * 5 == build_buffer(read("train.tasks_per_step=5", "train.buffer.max_groups=null")).max_groups

    options = ("max_groups=30", "max_staleness=3", "stale=correct", "dynamic_sampling=true")
    buffer = build_buffer(read("rollout.n=6", *(f"train.buffer.{option}" for option in options)))
    assert (6, 30, 3, "correct", True) == (
        buffer.group_size,
        buffer.max_groups,
        buffer.max_staleness,
        buffer.stale,
        buffer.dynamic_sampling,
    )


def test_the_parts_share_one_buffer_and_one_request_to_stop(tmp_path):
    """The source fills the buffer of the loop, and an interrupt of the loop reaches it."""
    for mode in ("sync", "async"):
        loop = build(read(f"train.mode={mode}"), tmp_path)

        assert loop.source.buffer is loop.buffer
        assert loop.source.interrupt is loop.stop
        assert (tmp_path, loop.setup.train.checkpoint.keep_last) == (loop.store.out, loop.store.keep_last)


def test_async_bounds_the_groups_in_flight(tmp_path):
    """No more groups are in flight than `max_staleness` + 1 steps train on."""
    setup = read("train.mode=async", "train.tasks_per_step=4", "train.buffer.max_staleness=2")

    producer = build(setup, tmp_path).source.producer

    assert (12, 4) == (producer.limit, producer.tasks_per_step)


def test_a_learner_samples_as_the_engine_does():
    """Temperature and response length come from the rollout's config."""
    spec = build_learner_spec(read("rollout.sampling.temperature=0.5", "rollout.response_length=99"))

    assert (0.5, 99) == (spec.temperature, spec.response_length)


def test_one_process_trains_here():
    """With one process, the model is loaded in this one, from the directory of the config."""
    setup = read()
    trainer = build_trainer(setup, SimpleNamespace())

    assert isinstance(trainer, LocalTrainer)
    assert setup.model.path == trainer.source


def test_a_single_sharded_process_leaves_no_file(monkeypatch, tmp_path):
    """Its group needs no rendezvous on disk."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    try:
        trainer = build_trainer(read("train.sharding.fully_shard=true"), SimpleNamespace())
        assert isinstance(trainer, LocalTrainer)
        assert 1 == dist.get_world_size()
    finally:
        dist.destroy_process_group()
    assert [] == list(tmp_path.iterdir())


def test_several_processes_need_ray(monkeypatch):
    """Without Ray, the error names the key and the command that installs it."""
    monkeypatch.setitem(sys.modules, "ray", None)
    # In case that an earlier test has imported it. The package, too, has it then, as an attribute.
    monkeypatch.delitem(sys.modules, "turnwise_grpo_trainer.processes.ray_trainer", raising=False)
    monkeypatch.delattr(processes, "ray_trainer", raising=False)

    with pytest.raises(ConfigError, match=r"num_processes: more than 1 needs ray: pip install 'turnwise\[ray\]'"):
        build_trainer(read("train.sharding.num_processes=2"), SimpleNamespace())


@pytest.mark.parametrize(
    ("overrides", "source", "sync"),
    [
        (("train.mode=sync",), SyncCollector, DirectSync),
        (("train.mode=async",), AsyncCollector, DirectSync),
        (("memory.mode=hybrid",), SyncCollector, HybridSync),
    ],
)
def test_the_parts_of_a_mode(tmp_path, overrides, source, sync):
    """`train.mode` decides where groups come from, and `memory.mode` how the engine gets new weights."""
    loop = build(read(*overrides), tmp_path)

    assert (source, sync) == (type(loop.source), type(loop.sync))


@pytest.mark.parametrize("level", [1, 2])
def test_the_engine_sleeps_at_the_configured_level(tmp_path, level):
    """On shared devices, `memory.level` is the level at which the engine sleeps during updates."""
    assert level == build(read("memory.mode=hybrid", f"memory.level={level}"), tmp_path).sync.level
