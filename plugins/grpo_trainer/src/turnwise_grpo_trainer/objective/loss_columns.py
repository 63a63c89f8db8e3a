"""Open columns of a batch as inputs of a loss; see `turnwise_grpo_trainer.objective.hooks.ColumnLoss`."""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from turnwise import RolloutBatch
from turnwise.errors import ConfigError, TrajectoryError
from turnwise_grpo_trainer.objective.hooks import ColumnLoss, PolicyLoss
from turnwise_grpo_trainer.objective.rows import TokenRows, unpad

_START: Final = "column/"
"""Start of the names of a loss's columns in `TokenRows`, where the trainer's columns have names without it."""
_ID_LOG_PROBS: Final = "id_log_probs"


def add_loss_columns(rows: TokenRows, batch: RolloutBatch, loss: PolicyLoss) -> TokenRows:
    """
    Return the rows with the columns that a loss reads.

    Raises:
        ConfigError: no record of the batch has a column, or it has values for prompts.
        TrajectoryError: a token in the loss has no value: it is not a number, or not an id.
    """
    if not isinstance(loss, ColumnLoss) or not len(rows.targets):
        return rows
    added = {}
    for name in loss.columns:
        if name not in batch.fields:
            raise ConfigError(
                f"train.loss: it reads the column {name!r}, which no record of the batch has; add a scorer that"
                " fills it to train.scorers"
            )
        field = batch.fields[name]
        if field.shape[1] != batch.response_length:
            raise ConfigError(f"train.loss: the column {name!r} is of all tokens; a loss reads those of responses")
        column = added[f"{_START}{name}"] = unpad(batch, field, batch.field_fills.get(name, 0))
        values = column[rows.targets].reshape(len(rows.targets), -1)
        missing = (values < 0 if name == loss.ids_column else torch.isnan(values)).any(1)
        if missing.any():
            row = batch.rows[int(rows.row_index[rows.targets[missing]][0])]
            raise TrajectoryError(
                f"column {name!r} has no value for {int(missing.sum())} of {len(missing)} tokens in the loss, the first"
                f" in a record of task {row.uid!r}"
            )
    return rows.with_columns(**added)


def find_labels(loss: PolicyLoss, labels: Tensor, columns: Mapping[str, Tensor]) -> Tensor | None:
    """Return (M, 1 + K) each token and the ids of the loss's `ids_column`; None for a loss without one."""
    if not isinstance(loss, ColumnLoss) or not loss.ids_column:
        return None
    return torch.cat([labels[:, None], columns[f"{_START}{loss.ids_column}"].long()], 1)


def split_log_probs(found: Tensor, columns: dict[str, Tensor]) -> Tensor:
    """Return (M,) log-probabilities of the tokens; the (M, K) ones of further ids become a column."""
    if found.ndim == 1:
        return found
    columns[_ID_LOG_PROBS] = found[:, 1:]
    return found[:, 0]


def more_inputs(loss: PolicyLoss, columns: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the further arguments of a `ColumnLoss`."""
    if not isinstance(loss, ColumnLoss):
        return {}
    given = {"columns": {name: columns[f"{_START}{name}"] for name in loss.columns}}
    return {**given, _ID_LOG_PROBS: columns[_ID_LOG_PROBS]} if loss.ids_column else given
