"""The reward: is the answer right, were paths opened, is all well formed, do the paths differ."""

from __future__ import annotations

from attrs import frozen

from turnwise import Episode, TrajectoryScore
from turnwise.errors import DataError
from turnwise_parallel_thinking.answers import is_right, last_answer
from turnwise_parallel_thinking.config import ParallelR1Config
from turnwise_parallel_thinking.diversity import self_bleu
from turnwise_parallel_thinking.tagged_text import is_well_formed, paths_of


@frozen
class _Facts:
    """What is scored: whether the answer is right, how many blocks were joined, whether all tags are in their place."""

    right: bool
    num_blocks: int
    well_formed: bool
    self_bleu: float

    @property
    def parallel(self) -> bool:
        """Whether there are blocks, and nothing is wrong with them."""
        return self.num_blocks > 0 and self.well_formed


class ParallelR1:
    """
    Scores an episode by one of the schemes of Parallel-R1.

    Blocks are counted in the record, so tags in a prompt count for nothing; whether tags are in their place is read
    from what the model's message says.

    Args:
        config: the scheme and its numbers.
    """

    def __init__(self, config: ParallelR1Config) -> None:
        self._config = config

    def score(self, episode: Episode) -> TrajectoryScore:
        """Return the score of an episode; `DataError` when its task has no ground truth and the scheme needs one."""
        facts = self._facts(episode)
        extra = {
            "correct": float(facts.right),
            "num_blocks": float(facts.num_blocks),
            "well_formed": float(facts.well_formed),
            "self_bleu": facts.self_bleu,
        }
        return TrajectoryScore(value=self._value(facts, episode), extra=extra)

    def _facts(self, episode: Episode) -> _Facts:
        config = self._config
        last = episode.messages[-1] if episode.messages else {}
        text = str(last.get("content") or "") if last.get("role") == "assistant" else ""
        blocks = paths_of(text, config.tags)
        return _Facts(
            right=self._is_right(text, episode),
            num_blocks=len({s.block for s in episode.trajectory.segments if s.block >= 0}),
            well_formed=is_well_formed(text, config.tags, config.min_paths),
            self_bleu=sum(map(self_bleu, blocks)) / len(blocks) if blocks else 0.0,
        )

    def _is_right(self, text: str, episode: Episode) -> bool:
        truth = episode.task.ground_truth
        if truth is None or not str(truth).strip():
            if self._config.scheme == "format":
                return False
            raise DataError(f"task {episode.task.uid!r} (row {episode.task.sample_index}) has no ground truth")
        answer = last_answer(text, self._config.answer_prefix, self._config.tail_chars)
        return answer is not None and is_right(answer, str(truth))

    def _value(self, facts: _Facts, episode: Episode) -> float:
        match self._config.scheme:
            case "format":
                return _sign(facts.parallel)
            case "times_parallel":
                return _sign(facts.right and facts.parallel)
            case "diversity":
                if not facts.right:
                    return -1.0
                return 1.2 - 0.2 * facts.self_bleu if facts.parallel else 1.0
            case "alternating" if not self._scores_accuracy(episode):
                return self._encouraging(facts)
        return _sign(facts.right)

    def _scores_accuracy(self, episode: Episode) -> bool:
        # Steps count from 1. Validation must mean the same at every step.
        turn = (episode.global_step - 1) % self._config.period
        return episode.validation or turn < self._config.num_accuracy_steps

    def _encouraging(self, facts: _Facts) -> float:
        if facts.right and facts.parallel:
            return self._config.bonus
        return _sign(facts.right and not facts.num_blocks)


def _sign(good: bool) -> float:
    return 1.0 if good else -1.0
