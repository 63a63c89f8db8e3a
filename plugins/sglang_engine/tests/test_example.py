"""The SGLang example under Ray gets the same rewards as the embedded engine."""

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_rewards_are_those_of_the_embedded_engine(expect_rewards_of_the_embedded_engine):
    """Over 256 episodes each, the means differ by less than three standard errors of the difference."""
    expect_rewards_of_the_embedded_engine("calculator_sglang.yaml")
