"""The reward passes the conformance suite."""

import pytest

from turnwise_testing import RewardSuite
from turnwise_testing.checks.reward import RewardExample


class TestExactMatch(RewardSuite):
    """The standard suite on `exact_match`."""

    entry_point = "calculator_demo"
    module = "turnwise_calculator_demo"
    registered = "exact_match"

    @pytest.fixture
    def examples(self):
        """Answers with their expected scores."""
        return (
            RewardExample(answer="The answer is 42.", ground_truth="42", expected=1.0),
            RewardExample(answer="The answer is 41.", ground_truth="42", expected=0.0),
            RewardExample(answer="", ground_truth="42", expected=0.0),
        )
