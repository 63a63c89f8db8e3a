"""Samples of a training step for a table: the first episodes of the file that the trainer writes for the step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from attrs import frozen

from turnwise.events.observer import MetricsLogged, TrainingStarted

HEADINGS: Final = ("step", "task", "sample", "status", "reward", "parts", "advantage", "prompt", "response")
_MAX_CHARACTERS: Final = 20_000
"""Longest text of a cell."""


@frozen(kw_only=True)
class Sample:
    """
    A trajectory of a training step.

    Attributes:
        step: training step.
        task: uid of the task.
        sample: number of the episode in its group.
        status: how the episode ended.
        reward: of the trajectory; None if it was not scored.
        parts: parts of the reward, as JSON.
        advantage: mean over the sampled tokens; None if it was not trained.
        prompt: text, or an empty one if the trainer wrote none.
        response: as `prompt`.
    """

    step: int
    task: str
    sample: int
    status: str
    reward: float | None
    parts: str
    advantage: float | None
    prompt: str
    response: str

    @property
    def cells(self) -> tuple[object, ...]:
        """The values in the order of `HEADINGS`."""
        return tuple(getattr(self, name) for name in HEADINGS)

    def as_markdown(self) -> str:
        """Return a heading and the texts as blocks of code, which show every character as it is."""
        numbers = [
            f"{name} {value:.3f}" for name in ("reward", "advantage") if (value := getattr(self, name)) is not None
        ]
        heading = ", ".join([f"`{self.task}` sample {self.sample}", self.status, *numbers])
        blocks = [
            f"{name}:\n\n{_indent(text)}" for name, text in (("prompt", self.prompt), ("response", self.response))
        ]
        return "\n\n".join([f"**{heading}**", *([f"`{self.parts}`"] if self.parts else []), *blocks])


def read_samples(training: TrainingStarted | None, event: MetricsLogged, limit: int) -> list[Sample]:
    """
    Return the first trajectories of the step whose metrics were logged.

    There are none for a validation, or if the trainer wrote no episodes for the step.

    Args:
        training: where the files are.
        event: the metrics.
        limit: most trajectories.
    """
    if training is None or limit == 0 or all(name.startswith("validation/") for name in event.values):
        return []
    file = training.folder / "episodes" / f"step-{event.step:08d}.parquet"
    return _read(file, event.step, limit) if file.is_file() else []


def _read(file: Path, step: int, limit: int) -> list[Sample]:
    from turnwise_result_files.row_file import read_rows

    return [
        Sample(
            step=step,
            task=row["uid"],
            sample=row["rollout_n"],
            status=row["status"],
            reward=row["reward"],
            parts=json.dumps(row["score_extra"]) if row["score_extra"] else "",
            advantage=_mean(row["advantages"], row["response_mask"]),
            prompt=shorten(row["prompt_text"]),
            response=shorten(row["response_text"]),
        )
        for row in islice(read_rows(file), limit)
    ]


def _mean(advantages: Sequence[float] | None, mask: Sequence[int] | None) -> float | None:
    if advantages is None or mask is None:
        return None
    sampled = [float(value) for value, is_sampled in zip(advantages, mask, strict=True) if is_sampled]
    return sum(sampled) / len(sampled) if sampled else None


def shorten(text: str | None) -> str:
    """Return a text of at most `_MAX_CHARACTERS` characters, and the length of a longer one; empty for None."""
    if text is None or len(text) <= _MAX_CHARACTERS:
        return text or ""
    return f"{text[:_MAX_CHARACTERS]} ... ({len(text)} characters)"


def _indent(text: str) -> str:
    # Every kind of line break, or the rest of a line would leave the block of code and become markup.
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
