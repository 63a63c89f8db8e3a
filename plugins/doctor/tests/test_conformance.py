"""The command and the diagnostics are registered as those of every other plugin."""

from turnwise_testing.suites.plugin import PluginSuite


class TestDoctor(PluginSuite):
    """The standard suite."""

    entry_point = "doctor"
    module = "turnwise_doctor"
    registered = "doctor"
    hook = "register_commands"


class TestTurnwise(PluginSuite):
    """The standard suite."""

    entry_point = "doctor"
    module = "turnwise_doctor"
    registered = "turnwise"
    hook = "register_diagnostics"


class TestMachine(PluginSuite):
    """The standard suite."""

    entry_point = "doctor"
    module = "turnwise_doctor"
    registered = "machine"
    hook = "register_diagnostics"


class TestRay(PluginSuite):
    """The standard suite."""

    entry_point = "doctor"
    module = "turnwise_doctor"
    registered = "ray"
    hook = "register_diagnostics"
