"""The bridge passes the plugin conformance suite; it registers the command `trl`."""

from turnwise_testing.suite import PluginSuite


class TestTrlBridge(PluginSuite):
    """The standard suite of plugins."""

    hook = "register_commands"
    entry_point = "trl_bridge"
    module = "turnwise_trl_bridge"
    registered = "trl"
