"""A frozen causal model that scores given ids, and whose weights leave the device while it sleeps."""

# ruff: noqa: TID253 - the scorer imports this module; no hook does

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from attrs import evolve, frozen
from torch import Tensor

from turnwise.errors import ConfigError
from turnwise.protocols import ModelSpec
from turnwise_distillation.config import TeacherConfig
from turnwise_engine_support.picture_families import supports_pictures
from turnwise_engine_support.pictures import PictureReader
from turnwise_grpo_trainer.config import PolicyConfig
from turnwise_grpo_trainer.learner.devices import select_device
from turnwise_grpo_trainer.learner.log_probs import measure_logits
from turnwise_grpo_trainer.learner.micro_batches import collate, pack_by_tokens, shard
from turnwise_grpo_trainer.learner.models import load_reference
from turnwise_grpo_trainer.objective.picture_rows import add_pictures
from turnwise_grpo_trainer.objective.row_pictures import Pictures
from turnwise_grpo_trainer.objective.rows import TokenRows


@frozen(eq=False)
class FrozenModel:
    """
    A model that is never trained.

    Attributes:
        model: of transformers; on the host while it sleeps, if it is offloaded.
        device: on which it computes.
        config: of the scorer.
        temperature: its logits are divided by it.
        num_ids: only lower ids may be among the most probable ones; higher ones are rows of weights without a token.
        key: names its path in errors.
        reader: of the pictures in its contexts; None for a model of text.
    """

    model: Any
    device: torch.device
    config: TeacherConfig
    temperature: float
    num_ids: int
    key: str
    reader: PictureReader | None = None

    @classmethod
    def load(
        cls, path: Path, config: TeacherConfig, *, policy: PolicyConfig, temperature: float, num_ids: int, key: str
    ) -> Self:
        """Load a folder as the trainer loads its reference; `ConfigError` if that is impossible."""
        options = evolve(policy, dtype=config.dtype, device=config.device, packed=False)
        device = select_device(options)
        model = load_reference(options, ModelSpec(path=path), key)
        if not config.offload:
            model.to(device)
        reader = PictureReader(path) if supports_pictures(path) else None
        return cls(model, device, config, temperature, num_ids, key, reader)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Have the weights on the device during the body."""
        self.model.to(self.device)
        try:
            yield
        finally:
            if self.config.offload and self.device.type != "cpu":
                self.model.to("cpu")
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()

    def score(
        self, rows: TokenRows, pictures: Pictures, chosen: Sequence[int]
    ) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """
        Score some rows, in a few forward passes of rows of similar length; the model is awake.

        Args:
            rows: B rows.
            pictures: of each row.
            chosen: numbers of the rows to score.

        Yields:
            (m,) positions of tokens of the loss mask in the rows, and their values: (m,) float32 log-probabilities, and
            with `top_k` (m, K) int32 ids and (m, K) float32 log-probabilities.

        Raises:
            ConfigError: one of the rows has a picture, and the model takes none.
            DataError: the model cannot read a picture.
        """
        own = [places if row in chosen else () for row, places in enumerate(pictures)]
        if self.reader is None and any(own):
            raise ConfigError(f"{self.key}: the tasks have pictures, and this model takes none")
        rows = add_pictures(rows, own, self.reader, self.model)
        (order,) = shard(rows, 1, chosen)
        chunk = self._chunk()
        for group in pack_by_tokens(rows, order, max_tokens=self.config.max_tokens_per_pass, packed=False):
            micro = collate(rows, group, packed=False)
            try:
                found = measure_logits(self.model, micro.to(self.device), self._measure, chunk=chunk)
            except ConfigError as error:  # the trainer's text names its own option
                key = f"{self.key.rpartition('.')[0]}.logits_mib"
                raise ConfigError(str(error).replace("train.policy.logits_mib", key)) from error
            yield micro.tokens, [each.cpu() for each in found]

    def _chunk(self) -> int | None:
        row_bytes = 4 * int(self.model.config.get_text_config().vocab_size)
        return max(1, int(self.config.logits_mib * (1 << 20)) // row_bytes) if self.config.logits_mib else None

    def _measure(self, logits: Tensor, labels: Tensor) -> Sequence[Tensor]:
        each = (logits.float() / self.temperature).log_softmax(-1)
        own = each.gather(-1, labels[:, None]).squeeze(-1)
        if not self.config.top_k:
            return (own,)
        best = each[:, : self.num_ids].topk(self.config.top_k)
        return own, best.indices.int(), best.values
