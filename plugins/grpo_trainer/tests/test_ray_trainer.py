"""Ray actors train what this process would, and hand out the whole weights."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from turnwise_grpo_trainer.config import OptimizerConfig, PolicyConfig, ShardingConfig, TrainConfig
from turnwise_grpo_trainer.sharding import LearnerSpec


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_two_actors(tmp_path, spec, mixed):
    """Two updates with a checkpoint between them, against an unsharded model in this process."""
    ray = pytest.importorskip("ray")
    from turnwise_grpo_trainer.ray_trainer import RayTrainer

    def setup(**sharding):
        train = TrainConfig(
            optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.0, eps=1e-5),
            policy=PolicyConfig(device="cpu", max_tokens_per_micro_batch=64),
            sharding=ShardingConfig(cpus_per_process=0, num_threads=1, **sharding),
        )
        rollout = SimpleNamespace(sampling=SimpleNamespace(temperature=1.0), response_length=64)
        run = SimpleNamespace(rollout=rollout, runtime=SimpleNamespace(ray=SimpleNamespace(address=None)))
        return SimpleNamespace(train=train, spec=spec, run=run)

    local = LearnerSpec.of(setup()).trainer()
    own = [local.update(mixed, step=step, version=0) for step in (1, 2)]
    expected = dict(local.weights())
    trainer = RayTrainer.start(setup(num_processes=2))
    try:
        first = trainer.update(mixed, step=1, version=0)
        trainer.save(tmp_path / "state")
        trainer.update(mixed, step=2, version=0)
        trainer.load(tmp_path / "state")
        second = trainer.update(mixed, step=2, version=0)
        weights = dict(trainer.weights())
        trainer.export(tmp_path / "model")
    finally:
        trainer.close()
        ray.shutdown()

    assert expected.keys() == weights.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(weights[name], array, rtol=0, atol=1e-6)
    for mine, theirs in zip(own, (first, second), strict=True):
        assert mine["actor/pg_loss"] == pytest.approx(theirs["actor/pg_loss"], abs=1e-6)
    assert (tmp_path / "model" / "model.safetensors").exists()
