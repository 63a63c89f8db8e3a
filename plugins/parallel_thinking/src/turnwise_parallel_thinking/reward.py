"""The reward `parallel_r1`, from the answer, the blocks, their format, and the diversity of their paths."""

from __future__ import annotations

from attrs import frozen

from turnwise import Episode, TrajectoryScore
from turnwise.errors import DataError
from turnwise_parallel_thinking.answers import extract_last_answer, is_correct
from turnwise_parallel_thinking.config import ParallelR1Config
from turnwise_parallel_thinking.diversity import self_bleu
from turnwise_parallel_thinking.tagged_text import extract_paths, is_well_formed


@frozen
class _Evaluation:
    """Facts about an episode, from which every scheme computes its score."""

    correct: bool
    num_blocks: int
    well_formed: bool
    self_bleu: float

    @property
    def parallel(self) -> bool:
        """Whether there are blocks and all are well formed."""
        return self.num_blocks > 0 and self.well_formed


class ParallelR1:
    """
    Scores an episode by a scheme of Parallel-R1.

    Blocks are counted in the record, so tags in a prompt do not count. The format is checked in the model's message.

    Args:
        config: the scheme and its parameters.
    """

    def __init__(self, config: ParallelR1Config) -> None:
        self._config = config

    def score(self, episode: Episode) -> TrajectoryScore:
        """Return the score of an episode; `DataError` if the scheme needs a ground truth and the task has none."""
        found = self._evaluate(episode)
        extra = {
            "correct": float(found.correct),
            "num_blocks": float(found.num_blocks),
            "well_formed": float(found.well_formed),
            "self_bleu": found.self_bleu,
        }
        return TrajectoryScore(value=self._score(found, episode), extra=extra)

    def _evaluate(self, episode: Episode) -> _Evaluation:
        config = self._config
        last = episode.messages[-1] if episode.messages else {}
        text = str(last.get("content") or "") if last.get("role") == "assistant" else ""
        blocks = extract_paths(text, config.tags)
        return _Evaluation(
            correct=self._is_correct(text, episode),
            num_blocks=len({s.block for s in episode.trajectory.segments if s.block >= 0}),
            well_formed=is_well_formed(text, config.tags, config.min_paths),
            self_bleu=sum(map(self_bleu, blocks)) / len(blocks) if blocks else 0.0,
        )

    def _is_correct(self, text: str, episode: Episode) -> bool:
        truth = episode.task.ground_truth
        if truth is None or not str(truth).strip():
            if self._config.scheme == "format":
                return False
            raise DataError(
                f"task {episode.task.uid!r} (row {episode.task.sample_index}) has no ground truth: set"
                " reward_model.ground_truth in the data"
            )
        answer = extract_last_answer(text, self._config.answer_prefix, self._config.tail_chars)
        return answer is not None and is_correct(answer, str(truth))

    def _score(self, found: _Evaluation, episode: Episode) -> float:
        match self._config.scheme:
            case "format":
                return _sign(found.parallel)
            case "times_parallel":
                return _sign(found.correct and found.parallel)
            case "diversity":
                if not found.correct:
                    return -1.0
                return 1.2 - 0.2 * found.self_bleu if found.parallel else 1.0
            case "alternating" if not self._scores_accuracy(episode):
                return self._score_parallel(found)
        return _sign(found.correct)

    def _scores_accuracy(self, episode: Episode) -> bool:
        # Steps count from 1. Validation scores must be comparable across steps.
        position = (episode.global_step - 1) % self._config.period
        return episode.validation or position < self._config.num_accuracy_steps

    def _score_parallel(self, found: _Evaluation) -> float:
        if found.correct and found.parallel:
            return self._config.bonus
        return _sign(found.correct and not found.num_blocks)


def _sign(good: bool) -> float:
    return 1.0 if good else -1.0
