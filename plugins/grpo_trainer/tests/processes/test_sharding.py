"""FSDP2: one process, two processes and an unsharded model make the same updates."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file

from turnwise.errors import ConfigError
from turnwise_grpo_trainer.config import AlgorithmConfig, LoraConfig, OptimizerConfig, PolicyConfig, TrainConfig
from turnwise_grpo_trainer.learner.learner import Learner
from turnwise_grpo_trainer.learner.model_state import load_state
from turnwise_grpo_trainer.loop.checksums import check_files, write_checksums
from turnwise_result_files import save_batch

SCRIPT = Path(__file__).parents[1] / "sharded_process.py"


def assert_changes_are_found(folder):
    """Write the checksums of a sharded checkpoint, and check that a change of any shard is found; return the shards."""
    write_checksums(folder)
    assert check_files(folder)
    shards = sorted(folder.glob("*.safetensors"))
    for shard in shards:
        content = shard.read_bytes()
        shard.write_bytes(content[:-4] + bytes(byte ^ 1 for byte in content[-4:]))
        with pytest.raises(ConfigError, match=shard.name):
            check_files(folder)
        shard.write_bytes(content)
    return shards


def train_in(world_size, folder, estimator, layout="padded"):
    """Run a group of processes; return the weights and the output of the first process."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", SCRIPT, str(rank), str(world_size), folder, estimator, layout],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [0] * world_size == [process.returncode for process in processes], outputs
    return load_file(folder / f"world{world_size}" / "weights.safetensors"), outputs[0][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "batch"), [("grpo", "mixed"), ("gae", "mixed"), ("lora", "mixed"), ("grpo", "grouped")]
)
def test_weights_do_not_depend_on_the_processes(tmp_path, model_dir, spec, request, estimator, batch):
    """
    After five steps and a restart, packed or padded, with adapters or not, weights differ by less than 1e-6.

    The processes forward shared prefixes of `grouped` once, and the model without shards does not.
    """
    mixed = request.getfixturevalue(batch)
    shutil.copytree(model_dir, tmp_path / "model")
    save_batch(mixed, tmp_path / "batch.safetensors")

    one, output_of_one = train_in(1, tmp_path, estimator)
    # Two processes pack their rows and compute logits by chunks; the others pad them and compute all logits together.
    two, output_of_two = train_in(2, tmp_path, estimator, "packed")

    config = TrainConfig(
        algorithm=AlgorithmConfig(
            adv_estimator="grpo" if estimator == "lora" else estimator,
            kl_loss_coef=0.01,
            ppo_mini_batch_size=5,
            ppo_epochs=2,
            target_kl=3e-6,
        ),
        optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.0, eps=1e-5),
        policy=PolicyConfig(device="cpu", max_tokens_per_micro_batch=64, share_prefixes=False),
        lora=LoraConfig(rank=4) if estimator == "lora" else None,
    )
    plain = Learner.load(config, spec, temperature=1.0, response_length=64, device=torch.device("cpu"))
    before = {name: tensor.clone() for name, tensor in plain.policy.full_weights()}
    for step in range(1, 6):
        metrics = plain.update(evolve(mixed), step=step, version=0)
    none = dict(plain.policy.full_weights())
    # The checkpoint of two processes continues in one without shards.
    resumed = Learner.load(config, spec, temperature=1.0, response_length=64, device=torch.device("cpu"))
    load_state(resumed, tmp_path / "world2" / "state")
    shards = assert_changes_are_found(tmp_path / "world2" / "state")
    assert len(shards) == 2
    for step in (4, 5):
        resumed.update(evolve(mixed), step=step, version=0)
    from_two = dict(resumed.policy.full_weights())

    assert one.keys() == two.keys() == none.keys() == from_two.keys()
    for other in (one, two, from_two):
        assert max((none[name] - other[name]).abs().max().item() for name in none) < 1e-6
    assert max((none[name] - before[name]).abs().max().item() for name in none) > 1e-4
    for output in (output_of_one, output_of_two):
        loss, norm, trace, agreement, nats, skipped = map(float, output.split())
        assert metrics["actor/pg_loss"] == pytest.approx(loss, abs=1e-6)
        assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert metrics["noise/trace"] == pytest.approx(trace, rel=1e-4)
        assert metrics["noise/agreement"] == pytest.approx(agreement, rel=1e-3)
        assert metrics["policy/nats"] == pytest.approx(nats, rel=1e-3)
        # All processes stop at the same mini-batch; otherwise they would wait for each other.
        assert metrics["actor/skipped"] == skipped
