"""The task source and the reward pass the conformance suites."""

import pytest
from attrs import evolve

from turnwise_reasoning_gym.source import ReasoningGymSource
from turnwise_task_files.rows import task_from_row
from turnwise_testing import RewardExample, RewardSuite, TaskSourceExample, TaskSourceSuite

pytestmark = pytest.mark.slow


class TestReasoningGymSource(TaskSourceSuite):
    """One data set and several, a level, and texts that are refused."""

    entry_point = "reasoning_gym"
    module = "turnwise_reasoning_gym"
    registered = "reasoning_gym"

    @pytest.fixture
    def examples(self):
        """Each text starts a process a few times."""
        return (
            TaskSourceExample(text="chain_sum,gcd?size=5&seed=3&level=1", num_rows=5),
            TaskSourceExample(text="chain_smu", error="did you mean 'chain_sum'?"),
            TaskSourceExample(text="chain_sum?min_term=3", error="did you mean 'min_terms'?"),
        )


class TestReasoningGymReward(RewardSuite):
    """Answers to tasks of two data sets."""

    entry_point = "reasoning_gym"
    module = "turnwise_reasoning_gym"
    registered = "reasoning_gym"

    @pytest.fixture
    def examples(self):
        """One that is right, one that is right beside other words, two that are wrong, and one without an end."""
        addition = task_from_row(next(iter(ReasoningGymSource().rows("chain_sum?size=1&seed=1"))))
        puzzle = task_from_row(next(iter(ReasoningGymSource().rows("puzzle24?size=1"))))
        truth = addition.ground_truth
        return (
            RewardExample(answer=truth, ground_truth=truth, task=addition, expected=1.0),
            RewardExample(answer=f"5 or <answer>{truth}</answer>", ground_truth=truth, task=addition, expected=1.0),
            RewardExample(answer=f"<answer>1{truth}</answer>", ground_truth=truth, task=addition, expected=0.0),
            RewardExample(answer="none", ground_truth=truth, task=addition, expected=0.0),
            RewardExample(answer="1 +", ground_truth=puzzle.ground_truth, task=evolve(puzzle, uid="p"), expected=0.01),
        )
