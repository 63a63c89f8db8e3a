"""The command is registered as that of every other plugin."""

from turnwise_testing.suites.plugin import PluginSuite


class TestBench(PluginSuite):
    """The standard suite."""

    entry_point = "routing_bench"
    module = "turnwise_routing_bench"
    registered = "bench"
    hook = "register_commands"
