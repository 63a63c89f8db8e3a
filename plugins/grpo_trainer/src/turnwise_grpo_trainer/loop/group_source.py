"""The interface between training loop and rollout: a source of whole groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from turnwise import UnfinishedEpisode
from turnwise_rollout_buffer import EpisodeGroup


class GroupSource(Protocol):
    """
    Supplies the groups of each training step: `SyncCollector` or `AsyncCollector`.

    Attributes:
        stage: name of the timing of `collect` in the logs.
    """

    stage: str

    def running(self) -> AbstractContextManager[None]:
        """Start the work in the background, and stop it after the body; an error in the background is raised there."""

    def collect(self, step: int) -> list[EpisodeGroup]:
        """
        Return the groups of a training step, counted from 1.

        There may be fewer than `tasks_per_step`, or none, if others were dropped for lack of variance.

        Raises:
            TrainingInterruptedError: the training was interrupted; the source keeps all episodes.
        """

    def undo_collect(self) -> None:
        """Called if an error ended the step before its groups were trained on, and before a checkpoint is written."""

    def notify(self) -> None:
        """Called after a step: the buffer may have room for more groups."""

    def interrupt_soon(self) -> None:
        """Called from a signal handler before episodes are aborted: keep them as unfinished, also after `paused`."""

    def paused(self) -> AbstractContextManager[None]:
        """Interrupt running episodes for the duration of a checkpoint; they resume afterwards."""

    @property
    def unfinished(self) -> tuple[UnfinishedEpisode, ...]:
        """The interrupted episodes; finished episodes of the same groups are in the buffer."""

    def load_partial(self, unfinished: Sequence[UnfinishedEpisode]) -> None:
        """Restore the interrupted episodes of a checkpoint, before `running`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""

    def load_state_dict(self, state: Mapping[str, Any], *, step: int) -> None:
        """
        Restore a state, which may be from another kind of source.

        Args:
            state: as returned by `state_dict`.
            step: number of completed training steps.
        """
