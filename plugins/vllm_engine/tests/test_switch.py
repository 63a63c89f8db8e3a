"""Hybrid steps with the real vLLM under Ray: after sleep and an update it serves only the new weights."""

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
NUM_STEPS = 3
BOUND = 1e-4
"""Nats by which a greedy token may be below the best one, because of ties."""

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class NoTrainer:
    """A trainer without memory."""

    def offload_optimizer(self): ...

    def offload_parameters(self): ...

    def onload(self): ...


def num_greedy(reference, results, variant):
    """Return how many sampled tokens are the best ones under a variant's weights, and how many there are."""
    right = total = 0
    for result in results:
        (trajectory,) = result.trajectories
        sampled = np.asarray(trajectory.response_mask) == 1
        ids = trajectory.input_ids.tolist()
        scores, best = reference.scores(ids, len(ids) - len(sampled), temperature=1.0, variant=variant)
        right += int(((best - scores)[sampled] <= BOUND).sum())
        total += int(sampled.sum())
    return right, total


def test_hybrid_steps_serve_no_stale_keys():
    """
    Every token is greedy under the weights of its step, and sleep frees the KV cache.

    Each step has the same tasks, whose prefixes vLLM could find in its cache, and sleeps at level 1 or 2 in turn.
    """
    from turnwise import MemorySwitch, RolloutManager, load_resolved
    from turnwise_calculator_demo import model_dir
    from turnwise_task_files import load_tasks
    from turnwise_testing.references.reference_model import TransformersReference

    run, host = load_resolved(
        str(ROOT / "examples" / "calculator_vllm.yaml"),
        [
            f"runtime.ray.replica_python={sys.executable}",
            "engine.engine_args={block_size: 32}",
            "memory.mode=hybrid",
            "rollout.sampling.temperature=0",
            "rollout.n=2",
            "rollout.response_length=128",
            "data.limit=6",
        ],
    )
    reference, tasks = TransformersReference(model_dir()), list(load_tasks(run))
    counts, versions, cached, freed, came = [], [], [], [], []
    with RolloutManager.from_config(run, host) as manager:
        switch = MemorySwitch(manager, NoTrainer())
        for step in range(1, NUM_STEPS + 1):
            manager.rollout(tasks)
            switch.level = 1 + step % 2
            sleep, *_ = switch.to_training().stages
            report = switch.to_rollout(reference.weights(variant=step))
            results = manager.rollout(tasks)
            counts.append((num_greedy(reference, results, step), num_greedy(reference, results, step - 1)))
            versions.append((report.version, {int(v) for r in results for v in r.trajectories[0].weight_versions}))
            cached.append(sum(result.metrics.num_cached_tokens for result in results))
            freed.append(sleep.engine_bytes[0] - sleep.engine_bytes[1])
            came.append(report.stages[-1].engine_bytes[1] - report.stages[-1].engine_bytes[0])

    cache = 256 << 20
    print(
        f"greedy (right, tokens) under the new weights, under the old ones: {counts}; MiB freed: {freed}; came: {came}"
    )
    assert min(cached) > 0
    assert all(right == total > 100 for (right, total), _ in counts)
    assert all(right < 0.99 * total for _, (right, total) in counts)
    assert [step for step, _ in versions] == list(range(1, NUM_STEPS + 1))
    assert all(found - {-1} == {step} for step, found in versions)
    assert min(came) > 0.95 * cache
    assert min(freed[1:]) > 0.95 * cache
