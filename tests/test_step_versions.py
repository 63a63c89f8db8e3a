"""
Training in step: an update between two batches leaves every token of a batch with one version.

The tokens depend on the weights, so a token is compared with the weights of the version that it claims. The engines and
the updates take time: a batch that started before its update had ended everywhere would have tokens of the old weights.
"""

import asyncio
import threading
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve, frozen
from ray_blueprint import ScriptedBlueprint
from ray_runs import FINISHED, ON_RAY, make_tasks, wait_until

from turnwise import SamplingParams
from turnwise.config.runtime import RayConfig, RuntimeConfig
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.ray.runtime import RayRuntime
from turnwise.runtime.ray.weights import GroupWeights
from turnwise.runtime.remote.weight_updates import WeightUpdater
from turnwise_testing.engines.bigram import NAME, BigramEngine, bigram_weights
from turnwise_weight_transports.config import BucketConfig
from turnwise_weight_transports.shm import SharedMemoryTransport

VOCAB_SIZE = 256
NUM_TASKS = 12
GREEDY = SamplingParams(temperature=0.0)
PLAN = RolloutPlan(default_agent="four", agents={"four": None}, sampling=GREEDY)


weights_of = cache(partial(bigram_weights, VOCAB_SIZE))


class SlowToUpdate(BigramEngine):
    """An engine that waits before and after it has new weights, and holds all calls but the first three."""

    folder, num_calls = "", 0

    async def generate(self, request):
        self.num_calls += 1
        while self.num_calls > 3 and self.is_held():  # noqa: ASYNC110 - another process ends it, by a file
            await asyncio.sleep(0.01)
        return await super().generate(request)

    def is_held(self):
        held = Path(self.folder, "hold").exists()
        if held:
            Path(self.folder, "held").touch()
        return held

    async def update_weights(self, weights, version):
        await asyncio.sleep(0.05)
        await super().update_weights(weights, version)
        await asyncio.sleep(0.05)


@frozen
class StepBlueprint(ScriptedBlueprint):
    """Replicas whose output depends on their weights alone, and whose updates take time."""

    token_latency_s: float = 0.002

    def make_engine(self):
        engine = SlowToUpdate(vocab_size=VOCAB_SIZE, max_context=2048, token_latency_s=self.token_latency_s)
        engine.folder = self.folder
        return engine

    def make_transport(self):
        return SharedMemoryTransport(BucketConfig(checksum="crc32"))


def local_manager(blueprint, num_workers=2):
    engine = blueprint.make_engine()
    return RolloutManager(LocalRuntime(engine, blueprint.make_components(engine), num_workers), PLAN)


def ray_manager(blueprint):
    config = RuntimeConfig(name="ray", num_workers=2, num_replicas=2, ray=RayConfig(heartbeat_timeout_s=120.0))
    weights = GroupWeights(WeightUpdater(blueprint.make_transport(), "shm"))
    return RolloutManager(RayRuntime(blueprint, config, weights=weights), PLAN)


@pytest.fixture(params=["local", pytest.param("ray", marks=[*ON_RAY, pytest.mark.slow])])
def manager(request, tmp_path):
    """A manager that is started."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    with (ray_manager if request.param == "ray" else local_manager)(StepBlueprint(folder=str(tmp_path))) as running:
        yield running


def update(manager):
    version = manager.weight_version + 1
    manager.update_weights({NAME: weights_of(version)})
    return version


def claimed_versions(results):
    """Return the versions that sampled tokens claim, and the number of tokens from other weights than they claim."""
    found, num_wrong = set(), 0
    for result in results:
        assert result.status in FINISHED
        [trajectory] = result.trajectories
        ids, mask = trajectory.input_ids, trajectory.response_mask
        claimed, start = np.broadcast_to(trajectory.weight_versions, mask.shape), len(ids) - len(mask)
        for place in np.flatnonzero(mask):
            version = int(claimed[place])
            found.add(version)
            best = weights_of(version)[ids[start + place - 1]].argmax()
            num_wrong += int(best) != int(ids[start + place])
    return found, num_wrong


def test_a_batch_in_step_has_one_version(manager):
    """Every replica samples a batch from the weights of the update before it, and the tokens say so."""
    for _step in range(4):
        version = update(manager)
        results = manager.rollout(make_tasks(NUM_TASKS), global_step=version)
        assert ({version}, 0) == claimed_versions(results)
        assert NUM_TASKS == len(results)


def test_a_batch_out_of_step_has_two_versions(manager, tmp_path):
    """The comparison can fail: an update during a batch shows, and no token claims other weights than its own."""
    before, results = update(manager), []
    (tmp_path / "hold").touch()
    rolling = threading.Thread(target=lambda: results.extend(manager.rollout(make_tasks(NUM_TASKS))))
    rolling.start()
    wait_until((tmp_path / "held").exists, "no call is held")
    after = update(manager)
    (tmp_path / "hold").unlink()
    rolling.join()

    assert ({before, after}, 0) == claimed_versions(results)


def test_a_wrong_version_is_seen(manager):
    """The comparison can fail: a batch that claims the version after its own has tokens that other weights sampled."""
    version = update(manager)
    [result] = manager.rollout(make_tasks(1), global_step=version)
    [record] = result.trajectories

    class Claims:
        input_ids, response_mask = record.input_ids, record.response_mask
        weight_versions = np.asarray(record.weight_versions) + 1

    found, num_wrong = claimed_versions([evolve(result, trajectories=(Claims(),))])
    assert {version + 1} == found
    assert num_wrong > 0
