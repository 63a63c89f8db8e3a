"""The command `convert` passes the conformance suite of plugins."""

from turnwise_testing.suites.plugin import PluginSuite


class TestConversions(PluginSuite):
    """The standard suite of plugins."""

    hook = "register_commands"
    entry_point = "conversions"
    module = "turnwise_conversions"
    registered = "convert"
