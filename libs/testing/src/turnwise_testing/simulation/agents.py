"""An agent, a tool and a reward for simulated episodes. They use every call of an episode and never read the time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from zlib import crc32

import numpy as np

from turnwise import Episode, State, TrajectoryScore
from turnwise.types import TokenArray, ToolCall, ToolResult

END: Final = 255
"""Id that ends a turn of a simulated model."""
MOVES: Final = ("turn", "best_of_two", "drop_sample", "drop_stops", "block", "tool", "tools", "branch")


def prompt_of(episode: Episode) -> TokenArray:
    """Return ids that differ for each rollout of each task."""
    return _ids_of_text(f"{episode.task.uid}#{episode.rollout_n}:")


class Wanderer:
    """
    Makes a few moves, one in each step. They follow from the task and the tokens so far, so a resumed episode repeats
    them.

    A task's `extra` has the names of the possible `moves`, `num_moves`, and perhaps `fails`, the numbers of the
    rollouts that fail in their last move.
    """

    async def step(self, episode: Episode) -> State:
        if episode.state == State.PENDING:
            episode.begin(prompt_of(episode))
            episode.memory["left"] = episode.task.extra["num_moves"]
            return State.GENERATING
        if episode.rollout_n in episode.task.extra.get("fails", ()) and episode.memory["left"] == 1:
            raise RuntimeError("this episode fails, as its task says")
        moves = episode.task.extra["moves"]
        name = moves[crc32(episode.trajectory.input_ids.tobytes()) % len(moves)]
        await getattr(self, f"_{name}")(episode)
        episode.memory["left"] -= 1
        return State.GENERATING if episode.memory["left"] > 0 else State.TERMINATED

    async def _turn(self, episode: Episode) -> None:
        await episode.generate()
        episode.observe(np.array([10, 11]))

    async def _best_of_two(self, episode: Episode) -> None:
        first, second = await episode.sample(), await episode.sample()
        episode.append(max(first, second, key=lambda result: result.token_ids.tolist()))
        episode.observe(np.array([12]))

    async def _drop_sample(self, episode: Episode) -> None:
        await episode.sample()
        episode.observe(np.array([13, 14, 15, 16]))
        await episode.generate()

    async def _drop_stops(self, episode: Episode) -> None:
        await episode.generate(drop_stops=True)
        episode.force(np.array([40]))
        episode.observe(np.array([50, 51]))

    async def _block(self, episode: Episode) -> None:
        if episode.remaining_tokens < 60:
            await self._turn(episode)
            return
        paths = episode.trajectory.fork(2)
        for path in paths:
            episode.force(np.array([30]), record=path)
        async with asyncio.TaskGroup() as group:
            for path in paths:
                group.create_task(episode.generate(record=path, max_tokens=8, drop_stops=True))
        episode.trajectory.join(paths)
        episode.force(np.array([31]))
        await episode.generate(drop_stops=True)
        episode.force(np.array([32]))

    async def _tool(self, episode: Episode) -> None:
        result = await episode.generate()
        await self._call(episode, int(result.token_ids.sum()))

    async def _tools(self, episode: Episode) -> None:
        result = await episode.generate()
        value = int(result.token_ids.sum())
        calls = [ToolCall(name="count", arguments={"value": value + number}) for number in range(2)]
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(episode.call_tool(call)) for call in calls]
        for answer in answers:
            episode.observe(_ids_of(answer.result()))

    async def _call(self, episode: Episode, value: int) -> None:
        episode.observe(_ids_of(await episode.call_tool(ToolCall(name="count", arguments={"value": value}))))

    async def _branch(self, episode: Episode) -> None:
        record = episode.trajectory
        mark = record.mark()
        await episode.generate(record=record)
        if len(episode.trajectories) < 3:
            branch = episode.branch(record, mark, seed_name=f"branch {len(episode.trajectories)}")
            episode.observe(np.array([17]), record=branch)
            await episode.generate(record=branch)


def _ids_of(result: ToolResult) -> TokenArray:
    return _ids_of_text(result.text)


def _ids_of_text(text: str) -> TokenArray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


class Count:
    """A tool that answers after a while, in a thread or on the event loop. Its answer depends on its argument alone."""

    name = "count"

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds

    @property
    def schema(self) -> dict[str, Any]:
        value = {"type": "integer"}
        parameters = {"type": "object", "properties": {"value": value}, "required": ["value"]}
        return {"type": "function", "function": {"name": "count", "description": "Counts.", "parameters": parameters}}

    async def create(self, task: object) -> object:
        return None

    async def execute(self, session: object, arguments: Mapping[str, Any]) -> ToolResult:
        value = int(arguments["value"])
        if value % 2:
            await asyncio.sleep(self._seconds())
        else:
            await asyncio.to_thread(time.sleep, self._seconds())
        return ToolResult(text=str(value % 100), reward=float(value % 3))

    async def release(self, session: object) -> None:
        """Do nothing."""


class Length:
    """Scores an episode by its sampled tokens, in a thread; several records get a score each."""

    def score(self, episode: Any) -> list[TrajectoryScore]:
        return [TrajectoryScore(value=float(record.response_mask.sum())) for record in episode.trajectories]
