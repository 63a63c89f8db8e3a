r"""The reward `torl_math`: correctness of the last `\boxed{}`, and a penalty for code that never ran."""

from __future__ import annotations

from turnwise import Episode, TrajectoryScore
from turnwise.errors import DataError
from turnwise_torl_python.answers import extract_last_boxed
from turnwise_torl_python.blocks import extract_python_blocks
from turnwise_torl_python.config import TorlMathConfig
from turnwise_torl_python.verifier import shared_verifier


class TorlMath:
    r"""
    Scores 1 or -1, plus the penalty if the model wrote code and no call of the episode ran without error.

    Only the model's own text counts: a `\boxed{}` that a program printed is no answer.

    Args:
        config: the penalty, and limits of comparisons.
    """

    def __init__(self, config: TorlMathConfig) -> None:
        self._config = config

    async def score(self, episode: Episode) -> TrajectoryScore:
        """Return the score of an episode; `DataError` if its task has no ground truth."""
        truth = _read_truth(episode)
        turns = [str(message["content"]) for message in episode.messages if message.get("role") == "assistant"]
        right = await self._is_right(truth, extract_last_boxed("".join(turns)))
        never_ran = not episode.memory.get("successes") and any(map(extract_python_blocks, turns))
        value = (1.0 if right else -1.0) + (self._config.error_penalty if never_ran else 0.0)
        return TrajectoryScore(value=value, extra={"correct": float(right), "code_never_ran": float(never_ran)})

    async def _is_right(self, truth: str, answer: str | None) -> bool:
        if answer is None:
            return False
        verifier = shared_verifier(self._config.timeout_s, self._config.processes)
        return await verifier.equals(truth, answer)


def _read_truth(episode: Episode) -> str:
    truth = episode.task.ground_truth
    text = "" if truth is None else str(truth)
    text = extract_last_boxed(text) or text
    if not text.strip():
        raise DataError(
            f"task {episode.task.uid!r} (row {episode.task.sample_index}) has no ground truth: set"
            " reward_model.ground_truth in the data"
        )
    return text
