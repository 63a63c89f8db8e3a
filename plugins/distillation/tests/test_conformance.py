"""The column, the scorer and the losses pass the conformance suites."""

import pytest

from turnwise_distillation.config import ReverseKlConfig, TeacherConfig, TopkKlConfig
from turnwise_testing import ColumnSuite, LossSuite, ScorerSuite


class TestTeacherLogprobs(ColumnSuite):
    """The column follows its tokens."""

    entry_point = "distillation"
    module = "turnwise_distillation"
    registered = "teacher_logprobs"


class TestTeacher(ScorerSuite):
    """The scorer, with the policy itself as the teacher."""

    entry_point = "distillation"
    module = "turnwise_distillation"
    registered = "teacher"

    @pytest.fixture
    def config(self, tmp_path):
        """Log-probabilities of sampled tokens, and of the most probable ids."""
        return TeacherConfig(path=tmp_path / "policy", top_k=3, device="cpu")


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
