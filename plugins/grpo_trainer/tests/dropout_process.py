"""
One process of a training of adapters with dropout; arguments are RANK WORLD FOLDER RESTART.

The folder holds the batch and the model. With RESTART `yes`, a checkpoint is loaded into new models after step 2.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from turnwise import ModelSpec
from turnwise_grpo_trainer.config import LoraConfig, OptimizerConfig, PolicyConfig, ShardingConfig, TrainConfig
from turnwise_grpo_trainer.learner.model_state import load_state, save_state
from turnwise_grpo_trainer.processes.sharding import LearnerSpec, join_group, load_local_trainer
from turnwise_result_files import load_batch


def main(rank: int, world_size: int, folder: Path, restart: str) -> None:
    """Make four updates, and write the adapters."""
    torch.set_num_threads(1)
    out = folder / f"world{world_size}-{restart}"
    out.mkdir(exist_ok=True)
    join_group(dist.FileStore(f"{out}/store", world_size), rank=rank, world_size=world_size, device=torch.device("cpu"))
    train = TrainConfig(
        optimizer=OptimizerConfig(lr=1e-3),
        policy=PolicyConfig(device="cpu", max_tokens_per_micro_batch=64),
        lora=LoraConfig(rank=4, dropout=0.2),
        sharding=ShardingConfig(fully_shard=True),
    )
    spec = LearnerSpec(train, ModelSpec(path=folder / "model"), 1.0, 64, seed=5)
    trainer = load_local_trainer(spec)
    batch = load_batch(folder / "batch.safetensors")
    for step in range(1, 5):
        trainer.update(batch, step=step, version=0)
        if step == 2 and restart == "yes":
            save_state(trainer.learner, out / "state")
            trainer = load_local_trainer(spec)
            load_state(trainer.learner, out / "state")
    weights = {name: tensor.contiguous().clone() for name, tensor in trainer.learner.policy.adapter_weights()}
    if rank == 0:
        save_file(weights, out / "weights.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
