"""The routers are registered as those of every other plugin."""

from turnwise_testing import RouterSuite


class TestLeastTokens(RouterSuite):
    """The standard suite."""

    entry_point = "routers"
    module = "turnwise_routers"
    registered = "least_tokens"


class TestRoundRobin(RouterSuite):
    """The standard suite."""

    entry_point = "routers"
    module = "turnwise_routers"
    registered = "round_robin"


class TestLeastRequests(RouterSuite):
    """The standard suite."""

    entry_point = "routers"
    module = "turnwise_routers"
    registered = "least_requests"


class TestConsistentHash(RouterSuite):
    """The standard suite."""

    entry_point = "routers"
    module = "turnwise_routers"
    registered = "consistent_hash"
