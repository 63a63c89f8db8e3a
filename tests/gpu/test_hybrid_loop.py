"""Trainings of the calculator task with engine and trainer on one device, and rollouts of other engines."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from gpu_support import report

from turnwise.cli import main
from turnwise.record.invariants import check_trajectory
from turnwise.types import Status

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("level", [1, 2])
def test_a_hybrid_training_of_the_calculator(target, tmp_path, level):
    """Rollouts, sleep, updates and wake-ups in turns: the sampled log-probabilities stay those of the trainer."""
    changes = ["memory.mode=hybrid", f"memory.level={level}", "train.num_steps=3", "train.tasks_per_step=4"]
    changes += ["data.validation_path=null", "train.validation.every=0"]
    changes += [f"engine.device={target.name}", f"train.policy.device={target.name}", "rollout.n=4"]
    changes += ["train.algorithm.ppo_mini_batch_size=null", "train.algorithm.old_log_probs=recompute"]
    out = tmp_path / "out"
    assert main(["train", str(EXAMPLES / "train_calculator.yaml"), *changes, "--out", str(out)]) == 0

    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [each for each in steps if "actor/grad_norm" in each]
    gaps = [each["gap/max"] for each in steps]
    report(target, f"hybrid training, level {level}: largest log-probability gaps {[f'{each:.1e}' for each in gaps]}")
    for name in sorted(name for name in steps[-1] if name.startswith(("switch/", "sync/"))):
        report(target, f"hybrid training, level {level}, last step: {name} {steps[-1][name]:.4g}")
    assert len(steps) == 3
    assert max(gaps) < 5e-2
    assert all(each["sync/bytes"] > 0 for each in steps)
    if target.is_cuda:
        assert all(each["switch/sleep_bytes"] < 0 for each in steps)
    assert (out / "model" / "config.json").is_file()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_rollout_of_another_engine(target, tmp_path, engine):
    """vLLM and SGLang run the calculator task on Ray, on a GPU of this machine."""
    for package in (engine, "ray"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not importable here")
    import sys

    from turnwise_result_files import read_results

    out, config = tmp_path / "out", EXAMPLES / f"calculator_{engine}.yaml"
    changes = [f"runtime.ray.replica_python={sys.executable}", "rollout.n=2", "data.limit=8"]
    changes += [f"runtime.device={'gpu' if target.is_cuda else 'cpu'}"]
    assert main(["rollout", str(config), *changes, "--out", str(out)]) == 0
    results = read_results(out / "trajectories.parquet")
    assert {each.status for each in results} <= {Status.COMPLETED, Status.TRUNCATED}
    for each in results:
        check_trajectory(each.trajectories[0])
