"""
How a running episode stands where an earlier one was cut, and how what is kept of it is made.

What is kept is data, see `turnwise.episode_spec`; how it answers in place of the world is `turnwise.journal`.
"""

from __future__ import annotations

from typing import Any

from attrs import evolve

from turnwise.episode import LiveEpisode
from turnwise.episode_spec import UnfinishedEpisode
from turnwise.journal import Journal, StepMark, copied
from turnwise.layout import Objective
from turnwise.tool_session import can_suspend
from turnwise.turns import recorded_turns


def restore(episode: LiveEpisode) -> None:
    """Let an episode stand where it was cut, or at its beginning."""
    kept = episode.spec.unfinished
    if kept is None:
        episode.messages = list(episode.task.messages)
        return
    episode.state, episode.last_finish = kept.state, kept.last_finish
    episode.messages, episode.memory = list(kept.messages), copied(dict(kept.memory))
    episode.trajectories = [trajectory.rewound(trajectory.mark()) for trajectory in kept.trajectories]
    episode.sampled = [recorded_turns(trajectory) for trajectory in episode.trajectories]
    episode.counters, episode.journal = kept.counters.copy(), Journal.of(kept)
    episode.chosen_objective = Objective(kept.objective) if kept.objective else None


def begin_step(episode: LiveEpisode) -> None:
    """Mark where the next step begins."""
    records = episode.trajectories
    mark = StepMark(
        episode.state,
        tuple(episode.messages),
        copied(episode.memory),
        len(records),
        records[-1].mark() if records else None,
        episode.counters.copy(),
        episode.last_finish,
        episode.chosen_objective or "",
    )
    episode.journal.begin_step(mark)


async def suspended(episode: LiveEpisode) -> UnfinishedEpisode:
    """
    Return what is needed to go on in another call, with the notes of what had sessions open and can be suspended.

    A session that was suspended is not released.
    """
    earlier = episode.spec.unfinished
    tool_notes: dict[str, Any] = dict(earlier.tool_notes) if earlier else {}
    interaction_notes = earlier.interaction_notes if earlier else None
    interaction: object = episode.services.interaction
    if episode.tools is not None:
        tool_notes |= await episode.tools.suspend()
    if interaction is not None and episode.interaction_open and can_suspend(interaction):
        interaction_notes = await interaction.suspend(episode.interaction_session)
        episode.interaction_open = False
    unfinished = episode.journal.cut(episode.spec, episode.trajectories)
    return evolve(unfinished, tool_notes=tool_notes, interaction_notes=interaction_notes)
