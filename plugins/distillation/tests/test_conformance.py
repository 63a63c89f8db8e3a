"""The column and the losses pass the conformance suites."""

import pytest

from turnwise_distillation.config import ReverseKlConfig, TopkKlConfig
from turnwise_testing import ColumnSuite, LossSuite


class TestTeacherLogprobs(ColumnSuite):
    """The column follows its tokens."""

    entry_point = "distillation"
    module = "turnwise_distillation"
    registered = "teacher_logprobs"


class TestReverseKl(LossSuite):
    """The loss on sampled tokens, mixed with a reward."""

    entry_point = "distillation"
    module = "turnwise_distillation"
    registered = "reverse_kl"

    @pytest.fixture
    def config(self):
        """Both parts have a weight."""
        return ReverseKlConfig(reward_weight=0.5)


class TestTopkKl(LossSuite):
    """The loss on the most probable ids, mixed with a reward."""

    entry_point = "distillation"
    module = "turnwise_distillation"
    registered = "topk_kl"

    @pytest.fixture
    def config(self):
        """Both parts have a weight."""
        return TopkKlConfig(reward_weight=0.5)


class TestForwardKl(TestTopkKl):
    """The same loss in the other direction."""

    @pytest.fixture
    def config(self):
        """The teacher's distribution is the first one."""
        return TopkKlConfig(direction="forward")
