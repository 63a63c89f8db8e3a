"""`python` is a tool as every other, and `sandbox` a command."""

from turnwise.testing.suite import PluginSuite


class TestPythonTool(PluginSuite):
    """The standard suite."""

    entry_point = "python_sandbox"
    module = "turnwise_python_sandbox"
    registered = "python"
    hook = "register_tools"


class TestSandboxCommand(PluginSuite):
    """The standard suite."""

    entry_point = "python_sandbox"
    module = "turnwise_python_sandbox"
    registered = "sandbox"
    hook = "register_commands"
