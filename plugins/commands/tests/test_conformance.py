"""The commands are registered as those of every other plugin."""

from turnwise_testing.suites.plugin import PluginSuite


class TestRollout(PluginSuite):
    """The standard suite."""

    entry_point = "commands"
    module = "turnwise_commands"
    registered = "rollout"
    hook = "register_commands"


class TestShow(PluginSuite):
    """The standard suite."""

    entry_point = "commands"
    module = "turnwise_commands"
    registered = "show"
    hook = "register_commands"


class TestPlan(PluginSuite):
    """The standard suite."""

    entry_point = "commands"
    module = "turnwise_commands"
    registered = "plan"
    hook = "register_commands"


class TestConfig(PluginSuite):
    """The standard suite."""

    entry_point = "commands"
    module = "turnwise_commands"
    registered = "config"
    hook = "register_commands"
