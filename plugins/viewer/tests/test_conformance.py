"""The command is registered as those of every other plugin."""

from turnwise_testing.suites.plugin import PluginSuite


class TestView(PluginSuite):
    """The standard suite."""

    entry_point = "viewer"
    module = "turnwise_viewer"
    registered = "view"
    hook = "register_commands"
