"""
Distillation: a policy learns from the log-probabilities of a teacher for the tokens that the policy sampled.

It registers the column `teacher_logprobs`, the scorer `teacher`, which fills it, and the losses `reverse_kl` and
`topk_kl`, which read what the scorer filled.
"""

from __future__ import annotations

from typing import Any

from turnwise import ColumnSpec, NoConfig, Registry, Resources, hookimpl
from turnwise_distillation.columns import LOGPROBS
from turnwise_distillation.config import ReverseKlConfig, TeacherConfig, TopkKlConfig


def declare_logprobs(config: NoConfig, resources: Resources) -> ColumnSpec:
    """Return the declaration of `teacher_logprobs`."""
    return LOGPROBS


def make_teacher(config: TeacherConfig, resources: Resources) -> Any:
    """Build the scorer; it loads its models when the training starts."""
    from turnwise_distillation.teacher import Teacher

    return Teacher(config)


def make_reverse_kl(config: ReverseKlConfig, resources: Resources) -> Any:
    """Build the loss on sampled tokens."""
    from turnwise_distillation.losses import ReverseKl

    return ReverseKl(config)


def make_topk_kl(config: TopkKlConfig, resources: Resources) -> Any:
    """Build the loss on the teacher's most probable ids."""
    from turnwise_distillation.losses import TopkKl

    return TopkKl(config)


@hookimpl
def register_columns(registry: Registry[ColumnSpec]) -> None:
    """Declare `teacher_logprobs`. The scorer declares the columns of the most probable ids, whose shape it knows."""
    registry.add("teacher_logprobs", declare_logprobs)


@hookimpl
def register_scorers(registry: Registry[Any]) -> None:
    """Register the scorer `teacher`."""
    registry.add("teacher", make_teacher, config=TeacherConfig)


@hookimpl
def register_losses(registry: Registry[Any]) -> None:
    """Register `reverse_kl` and `topk_kl`."""
    registry.add("reverse_kl", make_reverse_kl, config=ReverseKlConfig)
    registry.add("topk_kl", make_topk_kl, config=TopkKlConfig)
