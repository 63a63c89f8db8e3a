"""The reward `reasoning_gym`: the score that the data set of a task gives to the model's answer."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Final

from turnwise import Episode, TrajectoryScore
from turnwise.errors import DataError
from turnwise.types import JsonDict
from turnwise_reasoning_gym.answers import find_answer
from turnwise_reasoning_gym.config import RewardConfig
from turnwise_reasoning_gym.processes import GymProcess

MAX_ANSWER_CHARS: Final = 20_000
"""Longer answers score 0."""


class ReasoningGymReward:
    """
    Scores from 0 to 1.

    Args:
        config: how an answer is found, and limits.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config

    async def score(self, episode: Episode) -> TrajectoryScore:
        """
        Return the score of an episode.

        Raises:
            DataError: its task is of no data set of reasoning-gym.
            InfrastructureError: the process that scores does not start, or something else than its limit ended it.
        """
        request = _request_of(episode)
        turns = [str(message["content"] or "") for message in episode.messages if message.get("role") == "assistant"]
        answer = find_answer(turns[-1] if turns else "", self._config.answer)
        if not answer.text or len(answer.text) > MAX_ANSWER_CHARS:
            return TrajectoryScore(value=0.0)
        scorers = _shared_scorers(self._config.timeout_s, self._config.processes)
        # In a thread: the pipe of the process blocks, and other episodes go on.
        value = await asyncio.wrap_future(
            scorers.submit(request | {"answer": answer.text, "extracted": answer.extracted})
        )
        return TrajectoryScore(value=value)


def _request_of(episode: Episode) -> JsonDict:
    task = episode.task
    entry = task.extra.get("reasoning_gym")
    if not isinstance(entry, dict) or not {"data_set", "config", "metadata"} <= entry.keys():
        raise DataError(
            f"task {task.uid!r} (row {task.sample_index}) is of no data set of reasoning-gym; set data.path to"
            " reasoning_gym:DATA_SET"
        )
    return {**entry, "ground_truth": task.ground_truth}


class _Scorers:
    """Threads, each with a process that scores."""

    def __init__(self, timeout_s: float, num_processes: int) -> None:
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="turnwise-reasoning-gym")
        self._own = threading.local()
        self._processes: list[GymProcess] = []

    def submit(self, request: JsonDict) -> Future[float]:
        """Start to score a request; the future raises what `GymProcess.ask` raises."""
        return self._threads.submit(self._score, request)

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown(wait=True)
        for process in self._processes:
            process.close()

    def _score(self, request: JsonDict) -> float:
        process: GymProcess | None = getattr(self._own, "process", None)
        if process is None:
            process = self._own.process = GymProcess("score", str(self._timeout_s))
            self._processes.append(process)
        try:
            score = process.ask(request)["score"]
        except TimeoutError:
            return 0.0
        assert isinstance(score, float)
        return score


@lru_cache(maxsize=4)
def _shared_scorers(timeout_s: float, num_processes: int) -> _Scorers:
    """Return the scorers of this process for these limits; they are closed when the process exits."""
    scorers = _Scorers(timeout_s, num_processes)
    atexit.register(scorers.close)
    return scorers


if hasattr(os, "register_at_fork"):  # a forked child has none of the threads
    os.register_at_fork(after_in_child=_shared_scorers.cache_clear)
