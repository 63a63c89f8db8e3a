"""The reward: compares the last word of an answer with the name of the pattern."""

from __future__ import annotations

import re
from typing import Final

from turnwise import Episode, TrajectoryScore
from turnwise.errors import DataError
from turnwise_drawn_scenes.scenes import PATTERNS

_WORD: Final = re.compile(r"[a-z]+")


class SceneReward:
    """The reward `drawn_scenes`: 1.0 if the last word of the last assistant message is the pattern, otherwise 0.0."""

    def score(self, episode: Episode) -> TrajectoryScore:
        """
        Score a finished episode.

        An episode that reached a limit ends with a tool call or a tool message; it has no answer and scores 0.0.

        Raises:
            DataError: the task's ground truth is no pattern.
        """
        truth = episode.task.ground_truth
        if truth not in PATTERNS:
            raise DataError(f"task {episode.task.uid!r}: ground truth is {truth!r}, expected one of {[*PATTERNS]}")
        last = episode.messages[-1]
        is_answer = last.get("role") == "assistant" and not last.get("tool_calls")
        words = _WORD.findall(str(last.get("content") or "").lower()) if is_answer else []
        return TrajectoryScore(value=float(words[-1:] == [truth]))
