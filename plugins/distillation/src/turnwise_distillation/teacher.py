"""The scorer `teacher`: fills the columns of distillation by one or several frozen models."""

# ruff: noqa: TID253 - a factory imports this module; no hook does

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import define, evolve, field

from turnwise import ColumnSpec, EpisodeResult, Task
from turnwise.batch.rollout_batch import collate
from turnwise.errors import ConfigError
from turnwise_distillation.columns import LOGPROBS, topk_columns
from turnwise_distillation.config import TeacherConfig
from turnwise_distillation.frozen_model import FrozenModel
from turnwise_distillation.tokenizers import check_tokenizers, tokens_of
from turnwise_engine_support.picture_families import supports_pictures
from turnwise_grpo_trainer.objective.rows import TokenRows, pad
from turnwise_grpo_trainer.objective.scorers import ScoringRun
from turnwise_grpo_trainer.report.record_values import Values, split_by_record
from turnwise_result_files.messages import shows_picture

_COLLATE = partial(collate, pad_token_id=0)


@define(eq=False)
class Teacher:
    """
    Scores the tokens that the policy sampled, in the context in which the policy is trained on them.

    Tokens of failed episodes, of records that are not trained and of tools keep the fill of the columns.
    """

    config: TeacherConfig
    _models: dict[str, FrozenModel] = field(factory=dict, init=False)

    @property
    def columns(self) -> tuple[ColumnSpec, ...]:
        """The declarations of the columns that it fills."""
        return (LOGPROBS, *topk_columns(self.config.top_k)) if self.config.top_k else (LOGPROBS,)

    def check(self, run: ScoringRun) -> None:
        """
        Check the teachers and the tasks.

        Raises:
            ConfigError: a teacher is missing or has another tokenizer, or a task has no teacher, or pictures that its
                teacher does not take.
        """
        blind: dict[str, str] = {}  # keys of the teachers that take no pictures, by their names
        for name, key, path in self._teachers():
            if not (path / "config.json").is_file():
                raise ConfigError(f"{key}: {str(path)!r} is not a model directory: it has no config.json")
            check_tokenizers(run.model, path, key)
            if not supports_pictures(path):
                blind[name] = key
        for task in run.tasks:
            if (name := self._name_of(task)) in blind and any(map(shows_picture, task.messages)):
                raise ConfigError(f"{blind[name]}: task {task.uid!r} has a picture, and this model takes none")
        if self.config.top_k > (num_ids := _num_ids(run)):
            raise ConfigError(f"teacher: top_k is {self.config.top_k}, and the tokenizer has {num_ids} ids")

    def start(self, run: ScoringRun) -> None:
        """Load the models."""
        common: dict[str, Any] = {"policy": run.policy, "temperature": run.temperature, "num_ids": _num_ids(run)}
        for name, key, path in self._teachers():
            self._models[name] = FrozenModel.load(path, self.config, key=key, **common)

    def score(self, episodes: Sequence[EpisodeResult]) -> list[EpisodeResult]:
        """Return the episodes with the columns in each record that is trained."""
        batch = _COLLATE(episodes)
        rows = TokenRows.from_batch(batch, batch.loss_mask)
        filled = [torch.from_numpy(spec.filled(rows.num_tokens)) for spec in self.columns]
        for model, chosen in self._shares(episodes, [row.uid for row in batch.rows]):
            with model.awake():
                for tokens, found in model.score(rows, batch.column("pictures"), chosen):
                    for column, values in zip(filled, found, strict=True):
                        column[tokens] = values
        scored = list(episodes)
        for spec, column in zip(self.columns, filled, strict=True):
            by_record = split_by_record(episodes, pad(batch, column, spec.fill).numpy(), _COLLATE, spec.fill)
            scored = [_with_column(spec, *each) for each in zip(scored, by_record, strict=True)]
        return scored

    def _teachers(self) -> Iterator[tuple[str, str, Path]]:
        """Yield the name of each teacher, its key in errors, and its folder."""
        if self.config.path is not None:
            yield "", "teacher.path", self.config.path
        for name, path in self.config.teachers.items():
            yield name, f"teacher.teachers.{name}", path

    def _name_of(self, task: Task) -> str:
        if not self.config.teachers:
            return ""
        column = self.config.column
        value = getattr(task, column) if column in ("data_source", "agent_name") else task.extra.get(column)
        # Keys of a config are texts, and a column may have numbers. A truth value is written in many ways.
        name = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None
        if name is None or name not in self.config.teachers:
            known = ", ".join(map(repr, self.config.teachers))
            raise ConfigError(
                f"teacher.teachers: task {task.uid!r} has {value!r} in its column {column!r}; there are teachers for"
                f" {known}"
            )
        return name

    def _shares(
        self, episodes: Sequence[EpisodeResult], uids: Sequence[str]
    ) -> Iterator[tuple[FrozenModel, Sequence[int]]]:
        """Yield each teacher that has rows of a batch, and their numbers."""
        names: Mapping[str, str] = {each.task.uid: self._name_of(each.task) for each in episodes}
        for name, model in self._models.items():
            if chosen := [row for row, uid in enumerate(uids) if names[uid] == name]:
                yield model, chosen


def _num_ids(run: ScoringRun) -> int:
    """Return how many ids the policy's tokenizer has, gaps included."""
    return max(tokens_of(run.model), default=-1) + 1


def _with_column(spec: ColumnSpec, episode: EpisodeResult, values: Values) -> EpisodeResult:
    """Return an episode with a column in each record that has values."""
    records = (
        record if own is None else record.with_column(spec, own)
        for record, own in zip(episode.trajectories, values, strict=True)
    )
    return evolve(episode, trajectories=tuple(records))
