"""
One process of a sharded training; arguments are RANK WORLD FOLDER ESTIMATOR LAYOUT; the estimator `lora` is
grpo with adapters.

The folder holds the batch and the model. The layout of micro-batches is `padded`, or `packed` with logits
by chunks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from made_batches import VOCABULARY
from safetensors.torch import save_file

from turnwise import ModelSpec
from turnwise_grpo_trainer.config import (
    AlgorithmConfig,
    LoraConfig,
    OptimizerConfig,
    PolicyConfig,
    ShardingConfig,
    TrainConfig,
)
from turnwise_grpo_trainer.learner.model_state import load_state, save_state
from turnwise_grpo_trainer.processes.sharding import LearnerSpec, join_group, load_local_trainer
from turnwise_result_files import load_batch


def main(rank: int, world_size: int, folder: Path, estimator: str, layout: str) -> None:
    """Make five updates, with a restart from a checkpoint after the third, and write the unsharded weights."""
    torch.set_num_threads(1)
    out = folder / f"world{world_size}"
    out.mkdir(exist_ok=True)
    store = dist.FileStore(f"{out}/store", world_size)
    join_group(store, rank=rank, world_size=world_size, device=torch.device("cpu"))
    train = TrainConfig(
        algorithm=AlgorithmConfig(
            adv_estimator="grpo" if estimator == "lora" else estimator,
            kl_loss_coef=0.01,
            ppo_mini_batch_size=5,
            ppo_epochs=2,
            target_kl=3e-6,
        ),
        optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.0, eps=1e-5),
        policy=PolicyConfig(
            device="cpu",
            max_tokens_per_micro_batch=64,
            packed=layout == "packed",
            logits_mib=16 * 4 * VOCABULARY / (1 << 20) if layout == "packed" else None,
        ),
        lora=LoraConfig(rank=4) if estimator == "lora" else None,
        sharding=ShardingConfig(fully_shard=True),
    )
    spec = LearnerSpec(train, ModelSpec(path=folder / "model"), 1.0, 64)
    trainer = load_local_trainer(spec)
    batch = load_batch(folder / "batch.safetensors")
    for step in range(1, 6):
        metrics = trainer.update(batch, step=step, version=0)
        if step == 3:
            save_state(trainer.learner, out / "state")
            trainer = load_local_trainer(spec)
            load_state(trainer.learner, out / "state")
    weights = dict(trainer.learner.policy.full_weights())
    if rank == 0:
        save_file({name: tensor.contiguous().clone() for name, tensor in weights.items()}, out / "weights.safetensors")
        names = ("actor/pg_loss", "actor/grad_norm", "noise/trace", "noise/agreement", "policy/nats", "actor/skipped")
        sys.stdout.write(" ".join(str(metrics[name]) for name in names) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5])
