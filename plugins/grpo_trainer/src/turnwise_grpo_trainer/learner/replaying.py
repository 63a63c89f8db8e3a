"""The replays of a training at work: their columns in rows, and the forward passes of the policy under them."""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from turnwise import RolloutBatch
from turnwise.errors import ConfigError
from turnwise.protocols import ModelSpec
from turnwise_grpo_trainer.learner.micro_batches import MicroBatch
from turnwise_grpo_trainer.objective.replays import Replay
from turnwise_grpo_trainer.objective.rows import TokenRows

_START: Final = "replay/"
"""Start of the names of replayed columns in `TokenRows`."""


@frozen(eq=False)
class PolicyReplays:
    """
    The replays of a training.

    Attributes:
        parts: prepared with the policy.
    """

    parts: tuple[Replay, ...] = ()

    @classmethod
    def prepare(cls, parts: tuple[Replay, ...], policy: object, spec: ModelSpec) -> PolicyReplays:
        """Prepare replays with the loaded policy; `ConfigError` if it cannot replay."""
        for part in parts:
            part.prepare(policy, spec)
        return cls(parts)

    def add_columns(self, rows: TokenRows, batch: RolloutBatch) -> tuple[TokenRows, dict[str, float]]:
        """
        Return rows whose forward columns are also the replayed ones, and the share of their tokens that have values.

        Rows share a prefix only where the values of its tokens are equal.

        Raises:
            ConfigError: no record of the batch has a column.
            TrajectoryError: a value is none of the policy's.
        """
        metrics: dict[str, float] = {}
        for part in self.parts:
            if part.column not in batch.fields:
                raise ConfigError(
                    f"train.replays: the column {part.column!r}, which is replayed, is in no record of the batch"
                )
            values = part.read(batch.fields[part.column][batch.attention_mask.bool()])
            known = (values >= 0).flatten(1).any(1).float()
            metrics[f"replay/{part.column}"] = float(known.mean()) if len(known) else 0.0
            name = f"{_START}{part.column}"
            rows = evolve(rows, forward_columns=(*rows.forward_columns, name)).with_columns(**{name: values})
        return rows, metrics

    @contextmanager
    def running(self, micro: MicroBatch, *, active: bool = True) -> Iterator[None]:
        """Replay in the body, in which the policy computes a micro-batch; `active` is false for another model."""
        with ExitStack() as stack:
            for part in self.parts if active else ():
                stack.enter_context(part.replaying(micro.replayed[f"{_START}{part.column}"]))
            yield


def loss_inputs(rows: TokenRows, tokens: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Return the columns of some tokens that a loss may read, and `row`, the row of each; replayed ones are inputs."""
    read = {**rows.columns, "row": rows.row_index}
    return {name: column[tokens].to(device) for name, column in read.items() if not name.startswith(_START)}
