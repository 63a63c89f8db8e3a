"""The bridge passes the plugin conformance suite; it registers the commands `trl` and `sft`."""

from turnwise_testing.suites.plugin import PluginSuite


class TestTrl(PluginSuite):
    """The standard suite of plugins."""

    hook = "register_commands"
    entry_point = "trl_bridge"
    module = "turnwise_trl_bridge"
    registered = "trl"


class TestSft(TestTrl):
    """The same for the other command."""

    registered = "sft"
