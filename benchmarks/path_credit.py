"""
Measures the noise of a group's gradient with one advantage for an episode, and with one for each parallel path.

    python benchmarks/path_credit.py examples/train_parallel.yaml --tasks 64

All estimators get the same episodes, of the initial policy. The variance is the trace of the covariance of a group's
gradient, the noise scale is that divided by the squared length of the true gradient, in groups. Intervals are
bootstrapped over the groups (95 %). The seed of the config is used.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measurement import describe_machine
from torch import Tensor

from turnwise import RolloutBatch, RolloutManager
from turnwise.batch.rollout_batch import collate
from turnwise.config.file import load_config
from turnwise_grpo_trainer.config import AlgorithmConfig, PolicyConfig
from turnwise_grpo_trainer.learner.log_probs import token_log_probs
from turnwise_grpo_trainer.learner.micro_batches import collate as to_micro_batch
from turnwise_grpo_trainer.learner.micro_batches import pack_by_tokens, shard
from turnwise_grpo_trainer.learner.models import load_policy
from turnwise_grpo_trainer.objective.advantages import compute_loss_mask, estimate_advantages
from turnwise_grpo_trainer.objective.estimators import Grpo
from turnwise_grpo_trainer.objective.loss_options import PathCreditConfig
from turnwise_grpo_trainer.objective.path_credit import PathCredit
from turnwise_grpo_trainer.objective.path_ratios import measure_paths
from turnwise_grpo_trainer.objective.rows import TokenRows, unpad
from turnwise_task_files import load_tasks

CAPS = (1.0, 2.0, 10.0)
MAX_TOKENS = 4096


def log_probs_of(model: Any, temperature: float, rows: TokenRows, use: Callable[[Tensor, Tensor], object]) -> None:
    """Call `use` with the indices and the log-probabilities of the tokens of each micro-batch."""
    (order,) = shard(rows, 1)
    for group in pack_by_tokens(rows, order, max_tokens=MAX_TOKENS, packed=False):
        micro = to_micro_batch(rows, group, packed=False)
        use(micro.tokens, token_log_probs(model, micro, temperature)[0])


@torch.no_grad()
def compute_column(model: Any, temperature: float, rows: TokenRows) -> Tensor:
    """Return (N,) log-probabilities."""
    column = torch.zeros(rows.num_tokens)
    log_probs_of(model, temperature, rows, lambda tokens, values: column.index_copy_(0, tokens, values))
    return column


def gradient(model: Any, temperature: float, rows: TokenRows) -> Tensor:
    """Return the gradient of the mean over the tokens of advantage times log-probability."""
    model.zero_grad()
    weights = rows["advantages"] / len(rows.targets)
    log_probs_of(
        model, temperature, rows, lambda tokens, values: torch.autograd.backward((weights[tokens] * values).sum())
    )
    return torch.cat([each.grad.flatten() for each in model.parameters()])


def group_gradients(model: Any, temperature: float, batch: RolloutBatch, rows: TokenRows) -> Tensor:
    """Return (G, P) the gradient of each group."""
    groups = [
        (batch.group_index == group).nonzero().flatten().tolist() for group in range(int(batch.group_index.max()) + 1)
    ]
    return torch.stack([gradient(model, temperature, rows.select(group)) for group in groups])


def noise(gram: Tensor) -> tuple[float, float]:
    """Return the variance of a group's gradient and the squared length of the true one, from (G, G) dot products."""
    size = len(gram)
    whole = gram.sum().item() / size**2
    trace = (gram.diagonal().sum().item() / size - whole) * size / (size - 1)
    return trace, whole - trace / size


def interval(values: list[float]) -> str:
    """Return the middle 95 % of values as text."""
    low, high = torch.tensor(values).quantile(torch.tensor([0.025, 0.975])).tolist()
    return f"[{low:.2f}, {high:.2f}]"


def describe(name: str, gram: Tensor, plain: Tensor) -> str:
    """Return a line of the table; `plain` are the dot products with one advantage for an episode."""
    generator = torch.Generator().manual_seed(0)
    trace, signal = noise(gram)
    ratios = []
    for _ in range(1000):
        chosen = torch.randint(len(gram), (len(gram),), generator=generator)
        ratios.append(noise(gram[chosen][:, chosen])[0] / noise(plain[chosen][:, chosen])[0])
    scale = f"{trace / signal:.0f}" if signal > 0 else "not measurable"
    return f"| {name} | {trace:.4f} | {trace / noise(plain)[0]:.2f} {interval(ratios)} | {signal:.5f} | {scale} |"


def main() -> None:
    """Roll out, compute all gradients, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="run config of an agent with parallel paths")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="set a value of the config")
    parser.add_argument("--tasks", type=int, default=64, help="groups (default: 64)")
    arguments = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    config = load_config(arguments.config, [*arguments.overrides, f"data.limit={arguments.tasks}"])
    with RolloutManager.from_config(config) as manager:
        batch = collate(manager.rollout(load_tasks(config)), pad_token_id=0)
    temperature = config.rollout.sampling.temperature
    model = load_policy(PolicyConfig(device="cpu"), config.model_spec())
    mask = compute_loss_mask(batch)
    rows = TokenRows.from_batch(batch, mask)
    # The ratios do not depend on the estimator.
    every_row = torch.ones(len(batch), dtype=torch.bool)
    ratios = measure_paths(batch, rows, every_row, partial(compute_column, model, temperature))
    grams = {}
    for name in ("grpo", *CAPS):
        estimator = Grpo(True) if isinstance(name, str) else PathCredit(PathCreditConfig(ratio_cap=name))
        algorithm = AlgorithmConfig(adv_estimator="grpo" if isinstance(name, str) else "path_credit")
        found = estimate_advantages(batch, algorithm, estimator, mask=mask, leave_out=lambda _chosen: ratios)
        gradients = group_gradients(model, temperature, batch, rows.with_columns(advantages=unpad(batch, found.values)))
        grams["one advantage" if isinstance(name, str) else f"by path, cap {name:g}"] = gradients @ gradients.T
    right = (batch.episode_rewards > 0).float().mean().item()
    print(f"{describe_machine()}\n{len(batch)} episodes, {right:.3f} right; {' '.join(arguments.overrides)}\n")
    print("| credit | variance | relative to one advantage | squared signal | noise scale |\n|---|---|---|---|---|")
    for name, gram in grams.items():
        print(describe(name, gram, grams["one advantage"]))


if __name__ == "__main__":
    main()
