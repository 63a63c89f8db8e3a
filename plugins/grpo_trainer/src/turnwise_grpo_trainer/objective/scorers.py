"""
Scorers: parts of a training that fill open columns of its episodes, such as the log-probabilities of a teacher.

A scorer gets all episodes of a step at once, in the process of the command, after the rollout and before the batch. So
a model of it runs a few forward passes a step and not one for each episode, its values are in the files of episodes,
and an episode that waited in a checkpoint is scored when it is trained on. Held-out episodes are not scored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import evolve, frozen

import turnwise
from turnwise import EpisodeResult, Registry, Resources, Task
from turnwise.errors import ConfigError, PluginError
from turnwise.protocols import ModelSpec

if TYPE_CHECKING:
    from pathlib import Path

    from turnwise.config.own_code import OwnCode
    from turnwise.config.parts import Choice
    from turnwise.plugin.host import Host
    from turnwise_grpo_trainer.config import PolicyConfig


@frozen(kw_only=True)
class ScoringRun:
    """
    The training that a scorer serves.

    Attributes:
        model: the policy's, on this machine.
        policy: options of the computation of the policy.
        temperature: sampling temperature; the trainer divides the policy's logits by it, and a teacher's should be too.
        tasks: that are trained on.
    """

    model: ModelSpec
    policy: PolicyConfig
    temperature: float
    tasks: Sequence[Task]


@runtime_checkable
class Scorer(Protocol):
    """
    Fills open columns of the episodes of a training.

    It may have `columns`, the declarations of the columns that it fills, so that a loss without its column, and two
    scorers for one column, are refused before the run.
    """

    def check(self, run: ScoringRun) -> None:
        """Raise `ConfigError` if the scorer does not fit the training; called first, also by `--dry-run`."""

    def start(self, run: ScoringRun) -> None:
        """Load what `score` needs; called once, after the engine and the trainer have started."""

    def score(self, episodes: Sequence[EpisodeResult]) -> Sequence[EpisodeResult]:
        """
        Return the episodes of a step with columns, in the same order.

        `turnwise.Trajectory.with_column` gives a record a column. Nothing else of an episode may change. With
        `memory.mode: hybrid` the engine sleeps meanwhile, and the policy is on the device: free its memory at the end.
        """


@turnwise.hookspec
def register_scorers(registry: Registry[Scorer]) -> None:
    """Add scorers; see `Scorer`."""


def build_scorers(choices: Iterable[Choice], host: Host, code: OwnCode) -> tuple[Scorer, ...]:
    """Build the scorers of `train.scorers`; `ConfigError` or `PluginError` for one that cannot be built."""
    from turnwise.config.resolve import build_part

    return tuple(
        build_part(host, "scorers", choice, Resources(), path=f"train.scorers.{index}", code=code)
        for index, choice in enumerate(choices)
    )


def check_columns(scorers: Sequence[Scorer], needed: Iterable[str], declared: Iterable[str]) -> None:
    """
    Check the columns of the scorers that tell them.

    Args:
        scorers: of `train.scorers`.
        needed: names of the columns that the loss reads.
        declared: names of columns that an engine may give.

    Raises:
        ConfigError: two scorers fill one column, or no part can give one that the loss reads.
    """
    told = [[spec.name for spec in getattr(scorer, "columns", ())] for scorer in scorers]
    counts = Counter(name for names in told for name in names)
    if doubles := sorted(name for name, count in counts.items() if count > 1):
        raise ConfigError(
            f"train.scorers: {counts[doubles[0]]} scorers fill the column {doubles[0]!r}; keep one of them"
        )
    missing = sorted({*needed} - {*counts} - {*declared})
    if missing and all(told):
        filled = ", ".join(map(repr, sorted(counts))) or "none"
        raise ConfigError(
            f"train.loss: it reads the column {missing[0]!r}, and train.scorers fill {filled}; add a scorer, or an"
            " option of one, that fills it"
        )


def score_episodes(scorers: Iterable[Scorer], episodes: Sequence[EpisodeResult]) -> list[EpisodeResult]:
    """Return episodes with the columns of all scorers; `PluginError` if one returns others."""
    scored = list(episodes)
    for scorer in scorers:
        given = scorer.score(scored)
        if not isinstance(given, Sequence) or not all(isinstance(each, EpisodeResult) for each in given):
            raise PluginError(f"scorer {type(scorer).__name__} returned {shown(given)}, expected the episodes")
        found = list(given)
        if [each.uid for each in found] != [each.uid for each in scored]:
            raise PluginError(f"scorer {type(scorer).__name__} returned other episodes than it was given")
        scored = found
    return scored


def plain_choices(choices: Iterable[Choice], host: Host, base_dir: Path) -> list[dict[str, Any]]:
    """Return choices as plain values whose options have absolute paths, for the same config in another folder."""
    from turnwise.config.structuring import structure, unstructure

    def resolve(choice: Choice, path: str) -> Choice:
        if choice.is_own_code:
            return choice
        config = host.entry("scorers", choice.name).config
        return evolve(choice, options=unstructure(structure(choice.options, config, path=path, base_dir=base_dir)))

    return [unstructure(resolve(choice, f"train.scorers.{index}")) for index, choice in enumerate(choices)]
