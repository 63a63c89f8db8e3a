r"""The reward: is the last `\boxed{}` right, and did any of the code run."""

from __future__ import annotations

from turnwise import Episode, TrajectoryScore
from turnwise.errors import DataError
from turnwise_torl_python.answers import last_boxed
from turnwise_torl_python.blocks import python_blocks
from turnwise_torl_python.config import TorlMathConfig
from turnwise_torl_python.judge import shared_judge


class TorlMath:
    r"""
    Gives 1 or -1, and less where code was written and none of it ran without error.

    What counts is what the model wrote itself: a `\boxed{}` that a program printed is no answer. Runs are counted over
    all calls of the episode.

    Args:
        config: the penalty and the limits of a comparison.
    """

    def __init__(self, config: TorlMathConfig) -> None:
        self._config = config

    async def score(self, episode: Episode) -> TrajectoryScore:
        """Return the score of an episode; `DataError` when its task has no ground truth."""
        truth = _truth(episode)
        turns = [str(message["content"]) for message in episode.messages if message.get("role") == "assistant"]
        right = await self._is_right(truth, last_boxed("".join(turns)))
        fruitless = not episode.memory.get("successes") and any(map(python_blocks, turns))
        value = (1.0 if right else -1.0) + (self._config.error_penalty if fruitless else 0.0)
        return TrajectoryScore(value=value, extra={"correct": float(right), "code_never_ran": float(fruitless)})

    async def _is_right(self, truth: str, answer: str | None) -> bool:
        if answer is None:
            return False
        judge = shared_judge(self._config.timeout_s, self._config.processes)
        return await judge.equals(truth, answer)


def _truth(episode: Episode) -> str:
    truth = episode.task.ground_truth
    text = "" if truth is None else str(truth)
    text = last_boxed(text) or text
    if not text.strip():
        raise DataError(f"task {episode.task.uid!r} (row {episode.task.sample_index}) has no ground truth")
    return text
