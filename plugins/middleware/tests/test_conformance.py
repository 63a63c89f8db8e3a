"""All three pass the conformance suite of middleware."""

import pytest

from turnwise_middleware import RedactSecretsConfig, ShapeRewardConfig, ToolRateConfig
from turnwise_testing import MiddlewareSuite


class TestRedactSecrets(MiddlewareSuite):
    """The suite with a pattern that finds results of the suite's tool."""

    entry_point = "middleware"
    module = "turnwise_middleware"
    registered = "redact_secrets"

    @pytest.fixture
    def config(self):
        """The result of a sum is a secret."""
        return RedactSecretsConfig(patterns=("13",))


class TestToolRate(MiddlewareSuite):
    """The suite with one call for each episode."""

    entry_point = "middleware"
    module = "turnwise_middleware"
    registered = "tool_rate"

    @pytest.fixture
    def config(self):
        """One call."""
        return ToolRateConfig(max_calls=1, per_second=1000.0)


class TestShapeReward(MiddlewareSuite):
    """The suite with a price for turns."""

    entry_point = "middleware"
    module = "turnwise_middleware"
    registered = "shape_reward"

    @pytest.fixture
    def config(self):
        """A price and bounds."""
        return ShapeRewardConfig(turn_price=0.5, most=20.0)
