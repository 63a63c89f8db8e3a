"""The reward keeps the promises of the test kit."""

import pytest

from turnwise.testing.reward_checks import RewardExample
from turnwise.testing.reward_suite import RewardSuite


class TestExactMatch(RewardSuite):
    """`exact_match` through the standard suite."""

    entry_point = "calculator_demo"
    module = "turnwise_calculator_demo"
    registered = "exact_match"

    @pytest.fixture
    def examples(self):
        """Answers with what they are worth."""
        return (
            RewardExample(answer="The answer is 42.", ground_truth="42", expected=1.0),
            RewardExample(answer="The answer is 41.", ground_truth="42", expected=0.0),
            RewardExample(answer="", ground_truth="42", expected=0.0),
        )
