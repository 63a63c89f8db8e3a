"""The reward: answers, the schedule, format, diversity."""

import asyncio
import itertools

import pytest
from attrs import evolve

from turnwise import Resources
from turnwise.errors import DataError
from turnwise.testing.agent_probe import make_task
from turnwise.trajectory import Trajectory
from turnwise_parallel_thinking import make_parallel_r1
from turnwise_parallel_thinking.answers import is_right, last_answer
from turnwise_parallel_thinking.config import ParallelR1Config
from turnwise_parallel_thinking.diversity import self_bleu

BLOCK = "<Parallel><Path>{}</Path><Path>{}</Path></Parallel>\n<Summary>s</Summary>"
RIGHT, WRONG = "\nFinal Answer: 4", "\nFinal Answer: 5"


class Finished:
    """An episode that has ended."""

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
    """Every scheme on every kind of episode, `alternating` in a step that encourages blocks."""
    text, blocks = list(TEXTS.values())[index]

    assert VALUES[scheme][index] == pytest.approx(score(text, scheme, blocks=blocks, step=9))


def test_the_schedule():
    """Of ten steps eight are scored by accuracy and two encourage blocks; validation is the same at every step."""
    text, blocks = TEXTS["right in a block"]
    values = [score(text, "alternating", blocks=blocks, step=step) for step in range(1, 22)]

    assert [*[1.0] * 8, 1.2, 1.2, *[1.0] * 8, 1.2, 1.2, 1.0] == values
    assert {1.0} == {score(text, "alternating", blocks=blocks, step=s, validation=True) for s in range(1, 22)}


def test_blocks_are_counted_in_the_record():
    """A text that merely spells a block has none."""
    text, _ = TEXTS["right in a block"]

    assert -1.0 == score(text, "times_parallel", blocks=0)


def test_same_paths_are_worth_less():
    """Self-BLEU of equal paths is 1, of paths without a word in common 0."""
    same, other = "one two three four five", "six seven eight nine ten"

    assert 1.0 == pytest.approx(self_bleu([same, same]))
    assert 0.0 == self_bleu([same, other])
    assert 0.0 == self_bleu([same])
    assert 0.0 < self_bleu([same, "one two three nine ten"]) < 1.0
    assert 1.0 == pytest.approx(score(BLOCK.format(same, same) + RIGHT, "diversity", blocks=1))


def test_the_last_answer_of_the_tail_counts():
    """Earlier answers, and those further from the end than the tail, do not."""
    assert "2" == last_answer("Final Answer: 1\nfinal answer:  2 \n", "Final Answer:", 300)
    assert None is last_answer("Final Answer: 1" + "x" * 300, "Final Answer:", 300)
    assert None is last_answer("Final Answer:\n", "Final Answer:", 300)


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
    """Boxes, commas, units, currencies and spellings of fractions and roots make no difference."""
    assert is_right(answer, truth)


def test_different_numbers_differ():
    """No two of these are taken for each other."""
    assert not any(is_right(a, b) for a, b in itertools.permutations(["1", "10", "-1", "1.0", "\\frac{1}{2}"], 2))


def test_a_task_without_a_truth_is_the_datas_fault():
    """Only the format can be scored without one."""
    assert -1.0 == score(RIGHT, "format", truth=None)
    with pytest.raises(DataError, match="has no ground truth"):
        score(RIGHT, truth=None)


def test_in_an_episode(play):
    """The reward of a real episode reads the model's message."""
    run, _ = play(["<Parallel>", "\nFinal Answer: 4$"], [["a</Path>", "b</Path>"]], ["s</Summary>"])
    episode = run.episode
    episode.spec = evolve(episode.spec, task=evolve(episode.task, ground_truth="4"))
    found = make_parallel_r1(ParallelR1Config(scheme="times_parallel"), Resources()).score(episode)

    assert (1.0, 1.0, 1.0) == (found.value, found.extra["correct"], found.extra["num_blocks"])
    assert asyncio.iscoroutine(found) is False
