"""Tests of the reward: answers, the schedule, format, and diversity."""

import asyncio
import itertools

import pytest
from attrs import evolve

from turnwise import Resources
from turnwise.errors import DataError
from turnwise.record.trajectory import Trajectory
from turnwise_parallel_thinking import make_parallel_r1
from turnwise_parallel_thinking.answers import extract_last_answer, is_correct
from turnwise_parallel_thinking.config import ParallelR1Config
from turnwise_parallel_thinking.diversity import self_bleu
from turnwise_testing.probes.agent import make_task

BLOCK = "<Parallel><Path>{}</Path><Path>{}</Path></Parallel>\n<Summary>s</Summary>"
RIGHT, WRONG = "\nFinal Answer: 4", "\nFinal Answer: 5"


class Finished:
    """The parts of a finished episode that the reward reads."""

    def __init__(self, text, *, blocks=0, step=1, validation=False, truth="4"):
        self.task = evolve(make_task(), ground_truth=truth)
        self.messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
        self.global_step, self.validation = step, validation
        self.trajectory = Trajectory([1])
        for _ in range(blocks):
            paths = self.trajectory.fork(2)
            for path in paths:
                path.add_forced([1])
            self.trajectory.join(paths)


def score(text, scheme="accuracy", **options):
    """Return the value of a finished episode with this text."""
    return make_parallel_r1(ParallelR1Config(scheme=scheme), Resources()).score(Finished(text, **options)).value


TEXTS = {
    "right": (RIGHT, 0),
    "wrong": (WRONG, 0),
    "right in a block": (BLOCK.format("a b", "c d") + RIGHT, 1),
    "wrong in a block": (BLOCK.format("a b", "c d") + WRONG, 1),
    "right, badly formed": (BLOCK.format("a", "b") + "</Path>" + RIGHT, 1),
}
VALUES = {
    "accuracy": (1, -1, 1, -1, 1),
    "alternating": (1, -1, 1.2, -1, -1),
    "format": (-1, -1, 1, 1, -1),
    "times_parallel": (-1, -1, 1, -1, -1),
    "diversity": (1, -1, 1.2, -1, 1),
}


@pytest.mark.parametrize("scheme", VALUES)
@pytest.mark.parametrize("index", range(len(TEXTS)))
def test_schemes(scheme, index):
    """Every scheme has its score for every kind of episode, `alternating` in a step that rewards blocks."""
    text, blocks = list(TEXTS.values())[index]

    assert VALUES[scheme][index] == pytest.approx(score(text, scheme, blocks=blocks, step=9))


def test_the_schedule():
    """Eight of ten steps score accuracy and two reward blocks; validation scores accuracy at every step."""
    text, blocks = TEXTS["right in a block"]
    values = [score(text, "alternating", blocks=blocks, step=step) for step in range(1, 22)]

    assert [*[1.0] * 8, 1.2, 1.2, *[1.0] * 8, 1.2, 1.2, 1.0] == values
    assert {1.0} == {score(text, "alternating", blocks=blocks, step=s, validation=True) for s in range(1, 22)}


def test_blocks_are_counted_in_the_record():
    """A text with the tags of a block has no block in the record."""
    text, _ = TEXTS["right in a block"]

    assert -1.0 == score(text, "times_parallel", blocks=0)


def test_equal_paths_score_less():
    """Self-BLEU is 1 for equal paths, and 0 for paths without a common word."""
    same, other = "one two three four five", "six seven eight nine ten"

    assert 1.0 == pytest.approx(self_bleu([same, same]))
    assert 0.0 == self_bleu([same, other])
    assert 0.0 == self_bleu([same])
    assert 0.0 < self_bleu([same, "one two three nine ten"]) < 1.0
    assert 1.0 == pytest.approx(score(BLOCK.format(same, same) + RIGHT, "diversity", blocks=1))


def test_the_last_answer_of_the_tail_counts():
    """Earlier answers, and answers before the tail, do not count."""
    assert "2" == extract_last_answer("Final Answer: 1\nfinal answer:  2 \n", "Final Answer:", 300)
    assert None is extract_last_answer("Final Answer: 1" + "x" * 300, "Final Answer:", 300)
    assert None is extract_last_answer("Final Answer:\n", "Final Answer:", 300)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("$\\boxed{1,234}$", "1234"),
        ("x = 5", "5"),
        ("\\frac12", "\\frac{1}{2}"),
        ("\\dfrac{1}{2}", "\\frac{1}{2}"),
        ("\\sqrt3", "\\sqrt{3}"),
        ("12 meters", "12"),
        ("\\text{Monday}", "Monday"),
        ("30^\\circ", "30"),
        ("\\$7.", "7"),
    ],
)
def test_normal_forms(answer, truth):
    """Boxes, commas, units, currencies and notations of fractions and roots do not matter."""
    assert is_correct(answer, truth)


def test_different_numbers_differ():
    """Different values have different normal forms."""
    assert not any(is_correct(a, b) for a, b in itertools.permutations(["1", "10", "-1", "1.0", "\\frac{1}{2}"], 2))


def test_a_task_without_a_ground_truth_is_refused():
    """Only the scheme `format` needs no ground truth."""
    assert -1.0 == score(RIGHT, "format", truth=None)
    with pytest.raises(DataError, match="has no ground truth"):
        score(RIGHT, truth=None)


def test_in_an_episode(play):
    """The reward reads the model's message and the blocks of a real episode."""
    run, _ = play(["<Parallel>", "\nFinal Answer: 4$"], [["a</Path>", "b</Path>"]], ["s</Summary>"])
    episode = run.episode
    episode.spec = evolve(episode.spec, task=evolve(episode.task, ground_truth="4"))
    found = make_parallel_r1(ParallelR1Config(scheme="times_parallel"), Resources()).score(episode)

    assert (1.0, 1.0, 1.0) == (found.value, found.extra["correct"], found.extra["num_blocks"])
    assert asyncio.iscoroutine(found) is False
