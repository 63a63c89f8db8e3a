"""The command and the routers are registered as those of every other plugin."""

from turnwise_testing.suites.plugin import PluginSuite
from turnwise_testing.suites.router import RouterSuite


class TestBench(PluginSuite):
    """The standard suite."""

    entry_point = "routing_bench"
    module = "turnwise_routing_bench"
    registered = "bench"
    hook = "register_commands"


class TestRoundRobin(RouterSuite):
    """The standard suite."""

    entry_point = "routing_bench"
    module = "turnwise_routing_bench"
    registered = "round_robin"


class TestLeastRequests(RouterSuite):
    """The standard suite."""

    entry_point = "routing_bench"
    module = "turnwise_routing_bench"
    registered = "least_requests"


class TestConsistentHash(RouterSuite):
    """The standard suite."""

    entry_point = "routing_bench"
    module = "turnwise_routing_bench"
    registered = "consistent_hash"
