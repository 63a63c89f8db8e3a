"""Ray actors train the same policy as this process, and hand out unsharded weights."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

from turnwise.protocols.weights import TensorSpec
from turnwise.weights.sources import source_of
from turnwise_grpo_trainer.config import OptimizerConfig, PolicyConfig, ShardingConfig, TrainConfig
from turnwise_grpo_trainer.processes.sharding import LearnerSpec, load_local_trainer


def test_the_rendezvous_listens_on_one_address():
    """No other address of the machine reaches the store of the process group."""
    psutil = pytest.importorskip("psutil")
    pytest.importorskip("ray")
    from turnwise_grpo_trainer.processes.ray_trainer import open_store

    store = open_store("127.0.0.1")

    listeners = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert ["127.0.0.1"] == [each.ip for each in listeners if each.port == store.port]
    store.set("key", "value")
    assert b"value" == store.get("key")


def test_a_borrowed_gpu_is_the_only_visible_one(monkeypatch):
    """A process on the GPU of a replica sees that GPU, which Ray hides from it."""
    pytest.importorskip("ray")
    from turnwise_grpo_trainer.processes.ray_trainer import TrainerProcess

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    TrainerProcess(None, 1, 2, "3")

    assert "3" == os.environ["CUDA_VISIBLE_DEVICES"]


class GatheredWeights:
    """Weights of 1 KiB that exist only while they are held; `alive` has their names, and `peak` is the most at once."""

    specs = tuple(TensorSpec(f"w{i}", (256,), "float32") for i in range(64))

    def __init__(self):
        self.alive, self.peak = set(), 0

    def weights(self, *, adapters):
        return self

    def __iter__(self):
        for spec in self.specs:
            array = np.ones(spec.shape, spec.dtype)
            weakref.finalize(array, self.alive.discard, spec.name)
            self.alive.add(spec.name)
            self.peak = max(self.peak, len(self.alive))
            yield spec.name, array
            del array


@pytest.mark.parametrize(("rank", "num_sent", "peak"), [(0, 64, 5), (1, 0, 2)])
def test_no_process_holds_the_whole_weights(monkeypatch, rank, num_sent, peak):
    """Gathered weights of a bucket exist in the first process until they are sent, and one by one in the others."""
    pytest.importorskip("ray")
    from turnwise_grpo_trainer.processes.ray_trainer import TrainerProcess

    process, gathered, sent = TrainerProcess(None, rank, 2), GatheredWeights(), []
    monkeypatch.setattr(process, "_trainer", gathered)
    assert gathered.specs == process.start_weights(adapters=False)
    for _ in range(17):
        bucket = process.next_weights(4096)
        assert len(bucket) <= 4
        sent += [name for name, _array in bucket]
        del bucket

    assert num_sent == len(sent) == len(set(sent))
    assert 0 < gathered.peak <= peak
    assert not gathered.alive
    assert None is next(process._weights, None)  # all ranks have taken part in every gathering


LOGGING = """
from turnwise_grpo_trainer.build import import_ray_trainer

import_ray_trainer().connect_ray(None)
import ray


@ray.remote(num_cpus=0)
class Worker:
    def log(self, number):
        print(f"episode {number} finished", flush=True)


workers = [Worker.remote() for _ in range(3)]
ray.get([worker.log.remote(number) for number, worker in enumerate(workers)])
input()
"""


@pytest.mark.slow
@pytest.mark.ray
def test_lines_of_workers_reach_the_log():
    """All of them, also similar ones, although the trainer connects to Ray before the rollout does."""
    pytest.importorskip("ray")
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([sys.executable, "-c", LOGGING], **options) as process:
        late = threading.Timer(120, process.kill)
        late.start()
        missing, lines = set(range(3)), []
        while missing and (line := process.stdout.readline()):
            lines.append(line)
            missing -= {number for number in missing if f"episode {number} finished" in line}
        late.cancel()
        process.communicate("\n")

    assert not missing, "".join(lines)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_two_actors(tmp_path, spec, mixed):
    """Two updates with a checkpoint between them give the metrics and weights of an unsharded model."""
    ray = pytest.importorskip("ray")
    from turnwise_grpo_trainer.processes.ray_trainer import RayTrainer

    def learner_spec(**sharding):
        train = TrainConfig(
            optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.0, eps=1e-5),
            policy=PolicyConfig(device="cpu", max_tokens_per_micro_batch=64),
            sharding=ShardingConfig(cpus_per_process=0, num_threads=1, **sharding),
        )
        return LearnerSpec(train, spec, 1.0, 64)

    local = load_local_trainer(learner_spec())
    own = [local.update(mixed, step=step, version=0) for step in (1, 2)]
    expected = dict(local.weights())
    trainer = RayTrainer.start(learner_spec(num_processes=2), None)
    try:
        first = trainer.update(mixed, step=1, version=0)
        trainer.save(tmp_path / "state")
        trainer.update(mixed, step=2, version=0)
        trainer.load(tmp_path / "state")
        second = trainer.update(mixed, step=2, version=0)
        trainer.bucket_bytes = 1 << 14
        source = trainer.weights()
        next(iter(source))  # an iteration that is given up disturbs no later one
        weights = dict(source)
        adapters = dict(trainer.weights(adapters=True))
        trainer.export(tmp_path / "model")
    finally:
        trainer.close()
        ray.shutdown()

    assert not adapters
    assert source_of(weights).specs == source.specs
    assert expected.keys() == weights.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(weights[name], array, rtol=0, atol=1e-6)
    for mine, theirs in zip(own, (first, second), strict=True):
        assert mine["actor/pg_loss"] == pytest.approx(theirs["actor/pg_loss"], abs=1e-6)
    assert (tmp_path / "model" / "model.safetensors").exists()
