"""The command and the routers are registered as those of every other plugin."""

from turnwise_testing.suite import PluginSuite


class TestBench(PluginSuite):
    """The standard suite."""

    entry_point = "routing_bench"
    module = "turnwise_routing_bench"
    registered = "bench"
    hook = "register_commands"


class TestRoundRobin(PluginSuite):
    """The standard suite."""

    entry_point = "routing_bench"
    module = "turnwise_routing_bench"
    registered = "round_robin"
    hook = "register_routers"


class TestLeastRequests(PluginSuite):
    """The standard suite."""

    entry_point = "routing_bench"
    module = "turnwise_routing_bench"
    registered = "least_requests"
    hook = "register_routers"


class TestConsistentHash(PluginSuite):
    """The standard suite."""

    entry_point = "routing_bench"
    module = "turnwise_routing_bench"
    registered = "consistent_hash"
    hook = "register_routers"
