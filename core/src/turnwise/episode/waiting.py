"""
The parts of a run that its episodes wait for.

An episode keeps the times of its waits anyway, for its deadlines. They are read when someone asks, so a turn costs
nothing more.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable

from turnwise.episode.live import LiveEpisode
from turnwise.events.observer import Wait


def gather_waits(episodes: Iterable[LiveEpisode]) -> list[Wait]:
    """Return the waits of some episodes of the running event loop, one for each part, the longest first."""
    now, found = asyncio.get_running_loop().time(), defaultdict[str, list[tuple[float, LiveEpisode]]](list)
    for episode in episodes:
        part, since = find_wait(episode, now)
        found[part].append((now - since, episode))
    waits = []
    for part, each in found.items():
        seconds, longest = max(each, key=lambda pair: pair[0])
        waits.append(
            Wait(
                part=part,
                num_episodes=len(each),
                seconds=seconds,
                shortest_s=min(pair[0] for pair in each),
                uid=longest.uid,
                worker=longest.context.worker,
            )
        )
    return sorted(waits, key=lambda wait: -wait.seconds)


def find_wait(episode: LiveEpisode, now: float) -> tuple[str, float]:
    """Return the name of the part that an episode waits for, and the time of the loop since when."""
    requests, since = episode.timer.requests
    if requests:
        locate = getattr(episode.context.engine, "locate_request", None)
        return "engine" if locate is None else locate(requests[0]), since
    waits = episode.waits.since
    # The agent waits for the others.
    for task, wait in waits.items():
        if task.owner != "agent":
            return wait
    for name, since in waits.values():
        return name, max(since, episode.timer.returned_at, episode.waits.ended_at)
    return f"agent {episode.spec.agent_name!r}", now  # between two waits
