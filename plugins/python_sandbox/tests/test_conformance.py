"""The conformance suites of the tool `python` and the command `sandbox`."""

from turnwise_testing.suites.plugin import PluginSuite


class TestPythonTool(PluginSuite):
    """The tool is registered, configurable and light to import, as every tool is."""

    entry_point = "python_sandbox"
    module = "turnwise_python_sandbox"
    registered = "python"
    hook = "register_tools"


class TestSandboxCommand(PluginSuite):
    """The command is registered and light to import, as every command is."""

    entry_point = "python_sandbox"
    module = "turnwise_python_sandbox"
    registered = "sandbox"
    hook = "register_commands"


class TestDiagnostic(PluginSuite):
    """The standard suite on the diagnosis."""

    entry_point = "python_sandbox"
    module = "turnwise_python_sandbox"
    registered = "python_sandbox"
    hook = "register_diagnostics"
