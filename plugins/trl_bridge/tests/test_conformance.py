"""The bridge is a plugin as every other: it registers the command `trl`."""

from turnwise.testing.suite import PluginSuite


class TestTrlBridge(PluginSuite):
    """The standard suite."""

    hook = "register_commands"
    entry_point = "trl_bridge"
    module = "turnwise_trl_bridge"
    registered = "trl"
