"""New weights and sleep on a real Ray cluster: every token is from the version that it claims, whatever dies."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from attrs import frozen

sys.path.insert(0, str(Path(__file__).parent))

from ray_blueprint import END, ScriptedBlueprint

from turnwise import SamplingParams, Status, Task
from turnwise.config_runtime import RayConfig, RuntimeConfig
from turnwise.errors import EngineError
from turnwise.memory import MemorySwitch
from turnwise.runtime.group_weights import GroupWeights
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.ray_runtime import RayRuntime
from turnwise.runtime.weight_updates import WeightUpdates
from turnwise.testing.bigram import NAME, BigramEngine, bigram_weights
from turnwise_weight_transports.broadcast import BroadcastTransport
from turnwise_weight_transports.config import BroadcastConfig, BucketConfig
from turnwise_weight_transports.ray_store import RayTransport
from turnwise_weight_transports.shm import SharedMemoryTransport

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
VOCAB_SIZE = 256
TRANSPORTS = {
    "ray": lambda: RayTransport(BucketConfig(checksum="crc32")),
    "shm": lambda: SharedMemoryTransport(BucketConfig(checksum="xxh3")),
    "gloo": lambda: BroadcastTransport(BroadcastConfig(timeout_s=120)),
}


@frozen
class BigramBlueprint(ScriptedBlueprint):
    """Replicas whose output follows from their weights."""

    transport: str = "ray"
    token_latency_s: float = 0.002

    def make_engine(self):
        return BigramEngine(vocab_size=VOCAB_SIZE, max_context=2048, token_latency_s=self.token_latency_s)

    def make_transport(self):
        return TRANSPORTS[self.transport]()


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One Ray cluster on loopback for all tests of this file."""
    import ray

    here = str(Path(__file__).parent)
    environment = {"env_vars": {"PYTHONPATH": here}}
    ray.init(address="local", include_dashboard=False, num_cpus=8, namespace="turnwise", runtime_env=environment)
    yield
    ray.shutdown()


def manager(transport="ray", *, replicas=2, keep_last=True, **blueprint):
    options = RayConfig(backoff_s=0.05, heartbeat_s=0.2, heartbeat_timeout_s=5.0)
    config = RuntimeConfig(name="ray", num_workers=1, num_replicas=replicas, ray=options)
    weights = GroupWeights(WeightUpdates(TRANSPORTS[transport](), transport), keep_last=keep_last)
    runtime = RayRuntime(BigramBlueprint(transport=transport, **blueprint), config, weights=weights)
    greedy = SamplingParams(temperature=0.0)
    plan = RolloutPlan(default_agent="four", agent_names=frozenset({"four"}), sampling=greedy)
    return RolloutManager(runtime, plan)


def tasks(count):
    return [Task(messages=({"role": "user", "content": "x"},), uid=f"task{i}", sample_index=i) for i in range(count)]


def weights_of(version):
    return {NAME: bigram_weights(VOCAB_SIZE, seed=version)}


def versions_of(results):
    """Check that every sampled token is the best one under the weights of its version; return the versions."""
    found = set()
    for result in results:
        for trajectory in result.trajectories:
            ids, mask = trajectory.input_ids, trajectory.response_mask
            start = len(ids) - len(mask)
            claimed = np.asarray(trajectory.weight_versions)[-len(mask) :]
            for i in np.flatnonzero(mask):
                version = int(claimed[i])
                found.add(version)
                row = bigram_weights(VOCAB_SIZE, seed=version)[ids[start + i - 1]]
                assert int(row.argmax()) == ids[start + i]
    return found


def kill_one(running):
    import ray

    seat = running.runtime.policy.seats[0]
    before = seat.handle
    os.kill(int(ray.get(before.stats.remote())["pid"]), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while seat.handle is None or seat.handle is before:
        assert time.monotonic() < deadline, "no replica came back"
        time.sleep(0.05)


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_updates_under_load(transport):
    """Weights change many times while episodes run; every token replays on the version that it claims."""
    with manager(transport, token_latency_s=0.02) as running:
        running.update_weights(weights_of(1))  # each process imports what it needs for the first one
        stop = threading.Event()

        def update():
            while not stop.wait(0.02):
                running.update_weights(weights_of(running.weight_version + 1))

        updating = threading.Thread(target=update)
        updating.start()
        results = running.rollout(tasks(16))
        stop.set()
        updating.join()
        last = running.weight_version
        after = running.rollout(tasks(4))

    found = versions_of(results)
    assert all(result.status in (Status.COMPLETED, Status.TRUNCATED) for result in results)
    assert len(found) > 2
    assert {last} == versions_of(after)


def test_a_restarted_replica_serves_the_last_weights():
    """It gets them before it is given requests."""
    with manager() as running:
        report = running.update_weights(weights_of(1))
        kill_one(running)
        results = running.rollout(tasks(12))

    assert (1, "ray", [0, 1], VOCAB_SIZE**2 * 4) == (
        report.version,
        report.transport,
        [each.replica for each in report.replicas],
        report.num_bytes,
    )
    assert {1} == versions_of(results)


def test_without_a_copy_a_restarted_replica_waits_for_the_next_weights():
    """It serves nothing until then: never the weights that it started with."""
    with manager(keep_last=False) as running:
        running.update_weights(weights_of(1))
        seat = running.runtime.policy.seats[0]
        import ray

        os.kill(int(ray.get(seat.handle.stats.remote())["pid"]), signal.SIGKILL)
        results = running.rollout(tasks(6))
        while not running.runtime.weights._late:
            time.sleep(0.05)
        report = running.update_weights(weights_of(2))
        after = running.rollout(tasks(6))

    assert {1} == versions_of(results)
    assert [0, 1] == sorted(each.replica for each in report.replicas)
    assert {2} == versions_of(after)


def test_a_failed_update_leaves_the_old_version():
    """No replica takes weights of another shape; the error says why, and what served before serves on."""
    with manager() as running:
        running.update_weights(weights_of(1))
        with pytest.raises(EngineError, match=r"no replica took weight version 2: .*no weight 'bigram"):
            running.update_weights({NAME: np.zeros((2, 2), np.float32)})
        with pytest.raises(ValueError, match="weight version 2 is not above the last one, 2"):
            running.update_weights(weights_of(2), version=2)
        results = running.rollout(tasks(4))

    assert {1} == versions_of(results)


class NoTrainer:
    """A trainer without memory."""

    def offload_optimizer(self): ...

    def offload_parameters(self): ...

    def onload(self): ...


def test_memory_is_switched_on_the_cluster():
    """While replicas sleep requests are refused and their memory is free; after the switch they serve new weights."""
    with manager() as running:
        switch = MemorySwitch(running, NoTrainer(), level=2)
        switch.to_training()
        asleep = running.memory_bytes(), running.rollout(tasks(2))
        report = switch.to_rollout(weights_of(1))
        results = running.rollout(tasks(8))

    assert 0 == asleep[0]
    assert {"engine"} == {result.fault.owner for result in asleep[1]}
    assert all("asleep" in result.fault.message for result in asleep[1])
    assert (1, 2 * VOCAB_SIZE**2 * 4) == (report.version, report.stages[-1].engine_bytes[1])
    assert {1} == versions_of(results)
    assert END < VOCAB_SIZE
