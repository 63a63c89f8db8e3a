"""The held-out score of a training: its best step, and how long it has not improved."""

from __future__ import annotations

from collections.abc import Mapping

from turnwise.errors import ConfigError

PREFIX = "validation/"
Validations = Mapping[int, Mapping[str, float]]
"""Metrics of each validation, by step."""


def check_score_name(metrics: Mapping[str, float], name: str) -> None:
    """Raise `ConfigError` unless the metrics of a validation have a score of that name."""
    if PREFIX + name not in metrics:
        known = ", ".join(sorted(each.removeprefix(PREFIX) for each in metrics))
        raise ConfigError(f"train.validation.score: {name!r} is no metric of a validation; known: {known}")


def find_best_step(validations: Validations, name: str) -> int | None:
    """
    Return the step with the highest score, the earliest of equal ones; None without a score.

    A validation without a scored episode has no score.
    """
    scores = {step: each[PREFIX + name] for step, each in validations.items() if each[f"{PREFIX}reward/scored"] > 0}
    return max(scores, key=lambda step: (scores[step], -step), default=None)


def count_since_best(validations: Validations, name: str) -> int:
    """Return the number of validations after the best one; 0 without a score."""
    best = find_best_step(validations, name)
    return 0 if best is None else sum(step > best for step in validations)
