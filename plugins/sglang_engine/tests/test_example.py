"""The example: the demo task through SGLang under Ray, with rewards like those of the embedded engine."""

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_rewards_are_those_of_the_embedded_engine(expect_rewards_of_the_embedded_engine):
    """256 episodes each, on the same tasks: the means differ by less than three standard errors of the difference."""
    expect_rewards_of_the_embedded_engine("calculator_sglang.yaml")
