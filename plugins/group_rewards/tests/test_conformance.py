"""The group reward passes the conformance suite."""

import pytest

from turnwise_testing import GroupRewardSuite
from turnwise_testing.checks.group_reward import GroupExample


class TestRelativeLength(GroupRewardSuite):
    """The suite with right and wrong answers of several lengths."""

    entry_point = "group_rewards"
    module = "turnwise_group_rewards"
    registered = "relative_length"

    @pytest.fixture
    def examples(self):
        """Right and wrong answers; tokens are bytes, and each answer has one more at its end."""
        return (
            # 3, 5 and 7 tokens: terms 0.5, 0 and -0.5.
            GroupExample(answers=("42", "= 42", "it: 42"), rewards=(1.0, 1.0, 1.0), expected=(1.5, 1.0, 0.5)),
            # A wrong answer gets no bonus.
            GroupExample(answers=("41", "= 41", "it: 42"), rewards=(0.0, 0.0, 1.0), expected=(0.0, 0.0, 0.5)),
            GroupExample(answers=("42", "it: 41"), rewards=(1.0, 0.0), expected=(1.5, -0.5)),
        )
