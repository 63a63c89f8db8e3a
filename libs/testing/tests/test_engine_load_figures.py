"""What figures of updates under load must show before they prove anything."""

import pytest
from attrs import evolve

from turnwise_testing.checks.engine.load import LoadFigures

FIGURES = LoadFigures(
    num_updates=9,
    num_answers=100,
    num_mixed=10,
    num_versions=10,
    num_tokens=6400,
    num_right=6400,
    num_right_before=5800,
    num_tokens_before=6000,
    update_s=0.01,
    longest_update_s=0.1,
)


@pytest.mark.parametrize(("num_before", "num_telling"), [(6000, 200), (6000, 21), (100, 2), (5, 1)])
def test_enough_tokens_tell_versions_apart(num_before, num_telling):
    """Twenty tokens prove as much among thousands as among hundreds; of few tokens one in a hundred is asked."""
    evolve(FIGURES, num_tokens_before=num_before, num_right_before=num_before - num_telling).expect_right()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_right_before": 5980}, "cannot be told apart"),
        ({"num_tokens_before": 100, "num_right_before": 99}, "cannot be told apart"),
        ({"num_tokens_before": 0, "num_right_before": 0}, "no update reached a request"),
        ({"num_mixed": 0}, "updates wait until nothing runs"),
        ({"num_right": 6399}, "tokens that the weights of the version they claim give"),
    ],
)
def test_figures_that_prove_nothing_are_refused(changes, said):
    """A check that could not have failed, and a token of the wrong version."""
    with pytest.raises(AssertionError, match=said):
        evolve(FIGURES, **changes).expect_right()
