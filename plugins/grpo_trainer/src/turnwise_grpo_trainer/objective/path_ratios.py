"""
Parallel paths, and records without one of them.

B rows with R response columns; P paths.
"""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from turnwise import RolloutBatch
from turnwise.errors import ConfigError
from turnwise.layout import Layout, Objective, Run
from turnwise_grpo_trainer.objective.rows import TokenRows, pad

Compute = Callable[[TokenRows], Tensor]
"""Returns (N,) the policy's log-probabilities of the tokens in the loss."""


@frozen(eq=False)
class PathRatios:
    """
    The paths of some rows, and the rest of each episode without them.

    Attributes:
        path_of: (B, R) int64, the number of each response token's path; -1 outside of the P paths.
        log_ratios: (P,) log w: of the tokens after the path's block, the log-probability without the path, minus the
            one with all paths.
    """

    path_of: Tensor
    log_ratios: Tensor


def measure_paths(batch: RolloutBatch, rows: TokenRows, chosen: Tensor, compute: Compute) -> PathRatios:
    """
    Return the ratios of all paths of the chosen rows.

    Args:
        batch: B rows.
        rows: the same rows, with the column `loss_mask` and, if the trainer has computed them, `old_log_probs`, those
            of the policy before the update. If not, they are computed here, for the rows with paths.
        chosen: (B,) bool.
        compute: makes the forward passes.

    Raises:
        ConfigError: paths were expanded to rows, from which no path can be left out.
    """
    if Objective.EXPANDED in batch.column("objective"):
        raise ConfigError(
            "train.algorithm.adv_estimator: path_credit needs an engine with layouts, such as transformers, and"
            " agent.objective auto or exact: this batch has expanded rows"
        )
    runs = [(row, run) for row in chosen.nonzero().flatten().tolist() for run in runs_of(rows, row)]
    numbers = torch.zeros(rows.num_tokens, dtype=torch.int64)
    for number, (row, (_, start, stop)) in enumerate(runs, 1):
        numbers[rows.bounds[row] + start : rows.bounds[row] + stop] = number
    return PathRatios(pad(batch, numbers) - 1, _log_ratios(rows, runs, compute))


def _log_ratios(rows: TokenRows, runs: list[tuple[int, Run]], compute: Compute) -> Tensor:
    if not runs:
        return torch.zeros(0)
    # Both sides of the ratio come from one policy. Those of the rollout are from an older one if the episode is stale,
    # and its movement since then would count as the effect of a path.
    if "old_log_probs" not in rows.columns:
        with_paths = torch.zeros(len(rows), dtype=rows["loss_mask"].dtype)
        with_paths[[row for row, _run in runs]] = 1
        whole_rows = rows.with_columns(loss_mask=rows["loss_mask"] * with_paths[rows.row_index])
        rows = rows.with_columns(old_log_probs=compute(whole_rows))
    reduced = [leave_out(rows, row, run) for row, run in runs]
    names = reduced[0].columns
    bounds = np.cumsum([0, *(each.num_tokens for each in reduced)]).tolist()
    columns = {name: torch.cat([each[name] for each in reduced]) for name in names}
    whole = evolve(rows, columns=columns, bounds=tuple(bounds), pictures=None)
    change = (compute(whole) - whole["old_log_probs"]) * whole["loss_mask"]
    return torch.zeros(len(runs)).index_add(0, whole.row_index, change.float())


def runs_of(rows: TokenRows, row: int) -> list[Run]:
    """Return the paths of a row, in order."""
    span = slice(rows.bounds[row], rows.bounds[row + 1])
    starts = rows["path_start"][span]
    paths, counts = torch.unique_consecutive(starts[starts > 0], return_counts=True)
    blocks = rows["block_start"][span][paths]
    return [
        (block, start, start + count)
        for block, start, count in zip(blocks.tolist(), paths.tolist(), counts.tolist(), strict=True)
    ]


def leave_out(rows: TokenRows, row: int, path: Run) -> TokenRows:
    """Return a row without the tokens of a path; the tokens after the path's block remain in the loss."""
    block, first, end = path
    size = end - first
    others = [run for run in runs_of(rows, row) if run != path]
    after = max([end, *(stop for start, _, stop in others if start == block)])
    layout = Layout(
        (start - size if start >= end else start, *((at - size if begin >= end else at) for at in (begin, stop)))
        for start, begin, stop in others
    )
    start, stop = rows.bounds[row], rows.bounds[row + 1]
    index = torch.cat([torch.arange(start, start + first), torch.arange(start + end, stop)])
    columns = {name: column[index] for name, column in rows.columns.items()}
    names = ("position_ids", "block_start", "path_start")
    for name, values in zip(names, layout.columns(len(index)), strict=True):
        columns[name] = torch.from_numpy(values).to(columns[name].dtype)
    columns["loss_mask"] = columns["loss_mask"] * (index >= start + after)
    return evolve(rows, columns=columns, bounds=(0, len(index)), pictures=None)
