"""Weight updates and sleep on a real Ray cluster: every token is from the version that it claims, whatever dies."""

import asyncio
import os
import signal
import threading

import numpy as np
import pytest
from attrs import frozen
from ray_blueprint import END, ScriptedBlueprint
from ray_runs import FINISHED, ON_RAY, make_tasks, pids, wait_for_replacement, wait_until

from turnwise import SamplingParams
from turnwise.config.runtime import RayConfig, RuntimeConfig
from turnwise.errors import EngineError
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.ray.runtime import RayRuntime
from turnwise.runtime.ray.weights import GroupWeights
from turnwise.runtime.remote.weight_updates import WeightUpdater
from turnwise.weights.memory import MemorySwitch
from turnwise.weights.sources import source_of
from turnwise_testing.checks.transport import ReceivingEngine, assert_same
from turnwise_testing.engines.bigram import NAME, BigramEngine, bigram_weights
from turnwise_weight_transports.broadcast import BroadcastTransport
from turnwise_weight_transports.config import BroadcastConfig, BucketConfig
from turnwise_weight_transports.ray_store import RayTransport
from turnwise_weight_transports.shm import SharedMemoryTransport

pytestmark = [*ON_RAY, pytest.mark.usefixtures("ray_cluster")]
VOCAB_SIZE = 256
TRANSPORTS = {
    "ray": lambda: RayTransport(BucketConfig(checksum="crc32")),
    "shm": lambda: SharedMemoryTransport(BucketConfig(checksum="xxh3")),
    "gloo": lambda: BroadcastTransport(BroadcastConfig(timeout_s=120)),
}


@frozen
class BigramBlueprint(ScriptedBlueprint):
    """Replicas whose output depends on their weights alone."""

    transport: str = "ray"
    token_latency_s: float = 0.002

    def make_engine(self):
        return BigramEngine(vocab_size=VOCAB_SIZE, max_context=2048, token_latency_s=self.token_latency_s)

    def make_transport(self):
        return TRANSPORTS[self.transport]()


def make_manager(transport="ray", *, replicas=2, keep_last=True, **blueprint):
    options = RayConfig(backoff_s=0.05, heartbeat_s=0.2, heartbeat_timeout_s=120.0)
    config = RuntimeConfig(name="ray", num_workers=1, num_replicas=replicas, ray=options)
    weights = GroupWeights(WeightUpdater(TRANSPORTS[transport](), transport), keep_last=keep_last)
    runtime = RayRuntime(BigramBlueprint(transport=transport, **blueprint), config, weights=weights)
    greedy = SamplingParams(temperature=0.0)
    plan = RolloutPlan(default_agent="four", agents={"four": None}, sampling=greedy)
    return RolloutManager(runtime, plan)


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


def kill_one(manager):
    """Kill a replica and wait for its replacement."""
    slots = manager.runtime.policy.slots
    victim = pids(slots)[0]
    os.kill(victim, signal.SIGKILL)
    wait_for_replacement(slots, victim)


@pytest.mark.slow
@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_updates_under_load(transport):
    """Weights change many times while episodes run, and every token replays on the version that it claims."""
    with make_manager(transport, token_latency_s=0.02) as manager:
        manager.update_weights(weights_of(1))  # the first one makes each process import its packages
        stop = threading.Event()

        def update():
            while not stop.wait(0.02):
                manager.update_weights(weights_of(manager.weight_version + 1))

        updating = threading.Thread(target=update)
        updating.start()
        results = manager.rollout(make_tasks(16))
        stop.set()
        updating.join()
        last = manager.weight_version
        after = manager.rollout(make_tasks(4))

    found = versions_of(results)
    assert {result.status for result in results} <= FINISHED
    assert len(found) > 2
    assert {last} == versions_of(after)


@pytest.mark.slow
def test_large_weights_have_an_object_alone(ray_cluster):
    """Ray's store has one object for each of them and one for the small ones between; all arrive, strided ones too."""
    weights = {
        "large": np.arange(1 << 19, dtype=np.float32),
        "a": np.ones(3, np.float32),
        "b": np.full((2, 2), 2.0),
        "strided": np.arange(1 << 20, dtype=np.float32).reshape(1 << 10, 1 << 10).T,
    }
    transport, engine = RayTransport(BucketConfig(checksum="crc32")), ReceivingEngine()

    async def carry():
        async with transport.publish(1, source_of(weights), 1) as manifest:
            await transport.apply(engine, manifest)
            return len(manifest.locator["objects"])

    assert 3 == asyncio.run(carry())
    assert_same(weights, engine.weights)


@pytest.mark.slow
@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_a_restarted_replica_serves_the_last_weights(transport):
    """A replica that is killed and restarted receives the last weights before it receives requests."""
    with make_manager(transport) as manager:
        report = manager.update_weights(weights_of(1))
        kill_one(manager)
        results = manager.rollout(make_tasks(12))

    assert (1, transport, [0, 1], VOCAB_SIZE**2 * 4) == (
        report.version,
        report.transport,
        [each.replica for each in report.replicas],
        report.num_bytes,
    )
    assert {1} == versions_of(results)


@pytest.mark.slow
@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "at once"])
def test_an_update_waits_for_the_only_replica(noticed):
    """The only replica was killed: the update waits for its replacement, also if the driver does not know it yet."""
    with make_manager(replicas=1) as manager:
        manager.update_weights(weights_of(1))
        (slot,) = manager.runtime.policy.slots
        os.kill(pids([slot])[0], signal.SIGKILL)
        if noticed:
            wait_until(lambda: slot.handle is None, "the loss was not noticed")
        report = manager.update_weights(weights_of(2))
        results = manager.rollout(make_tasks(4))

    assert [(0, "")] == [(each.replica, each.error) for each in report.replicas]
    assert 2 == slot.num_starts
    assert {2} == versions_of(results)


@pytest.mark.slow
def test_a_failed_update_leaves_the_old_version():
    """Every replica refuses weights of another shape; the error gives the reason, and the old version still serves."""
    with make_manager() as manager:
        manager.update_weights(weights_of(1))
        with pytest.raises(EngineError, match=r"no replica was updated to weight version 2: .*no weight 'bigram"):
            manager.update_weights({NAME: np.zeros((2, 2), np.float32)})
        with pytest.raises(ValueError, match="weight version 2 is not above the last one, 2"):
            manager.update_weights(weights_of(2), version=2)
        results = manager.rollout(make_tasks(4))

    assert {1} == versions_of(results)


@pytest.mark.slow
def test_without_a_copy_a_restarted_replica_waits_for_the_next_weights():
    """A restarted replica never serves the weights that it was started with."""
    with make_manager(keep_last=False) as manager:
        manager.update_weights(weights_of(1))
        os.kill(pids(manager.runtime.policy.slots)[0], signal.SIGKILL)
        results = manager.rollout(make_tasks(6))
        wait_until(lambda: manager.runtime.weights._outdated, "no replica came back without weights")
        report = manager.update_weights(weights_of(2))
        after = manager.rollout(make_tasks(6))

    assert {1} == versions_of(results)
    assert [0, 1] == sorted(each.replica for each in report.replicas)
    assert {2} == versions_of(after)


class NoTrainer:
    """A trainer without memory."""

    def offload_optimizer(self): ...

    def offload_parameters(self): ...

    def onload(self): ...


@pytest.mark.slow
def test_memory_is_switched_on_the_cluster():
    """While replicas sleep, requests are refused and their memory is free; after the switch they serve new weights."""
    with make_manager() as manager:
        switch = MemorySwitch(manager, NoTrainer(), level=2)
        switch.to_training()
        asleep = manager.memory_bytes(), manager.rollout(make_tasks(2))
        report = switch.to_rollout(weights_of(1))
        results = manager.rollout(make_tasks(8))

    assert 0 == asleep[0]
    assert {"engine"} == {result.fault.owner for result in asleep[1]}
    assert all("asleep" in result.fault.message for result in asleep[1])
    assert (1, 2 * VOCAB_SIZE**2 * 4) == (report.version, report.stages[-1].engine_bytes[1])
    assert {1} == versions_of(results)
    assert END < VOCAB_SIZE
