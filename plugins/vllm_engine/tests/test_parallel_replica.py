"""A replica of two devices under Ray: vLLM starts its processes in one bundle, updates weights and sleeps."""

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
BOUND = 1e-4
"""Nats by which a greedy token may be below the best one, because of ties."""

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def all_greedy(reference, results, variant):
    """Return whether every sampled token is the best one under a variant's weights, and how many tokens there are."""
    below = []
    for result in results:
        (trajectory,) = result.trajectories
        sampled = np.asarray(trajectory.response_mask) == 1
        ids = trajectory.input_ids.tolist()
        scores, best = reference.scores(ids, len(ids) - len(sampled), temperature=1.0, variant=variant)
        below.extend((best - scores)[sampled])
    return bool((np.array(below) <= BOUND).all()), len(below)


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_devices_in_one_bundle(size):
    """One Ray actor serves, sleeps, and then serves new weights from both processes."""
    from turnwise import RolloutManager, load_resolved
    from turnwise_calculator_demo import model_dir
    from turnwise_task_files import load_tasks
    from turnwise_testing.reference_model import TransformersReference

    run, host = load_resolved(
        str(ROOT / "examples" / "calculator_vllm.yaml"),
        [
            f"runtime.ray.replica_python={sys.executable}",
            "engine.engine_args={block_size: 32}",
            f"engine.{size}=2",
            "runtime.num_replicas=null",
            "runtime.total_devices=2",
            "rollout.sampling.temperature=0",
            "rollout.response_length=128",
            "data.limit=4",
        ],
    )
    reference, tasks = TransformersReference(model_dir()), list(load_tasks(run))
    with RolloutManager.from_config(run, host) as manager:
        first = manager.rollout(tasks)
        awake = manager.memory_bytes()
        manager.sleep()
        asleep = manager.memory_bytes()
        manager.wake_up()
        report = manager.update_weights(reference.weights(variant=1))
        second = manager.rollout(tasks)

    assert [1] == [len(report.replicas)]
    greedy, count = all_greedy(reference, first, 0)
    assert greedy
    assert count > 50
    greedy, count = all_greedy(reference, second, 1)
    assert greedy
    assert count > 50
    assert asleep < awake
