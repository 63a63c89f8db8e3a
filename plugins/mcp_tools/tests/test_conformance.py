"""The conformance suite of the tools `mcp`."""

import pytest

from turnwise_mcp_tools.config import McpConfig, ServerConfig
from turnwise_testing.suites.plugin import PluginSuite


class TestMcpTools(PluginSuite):
    """The tools are registered, configurable and light to import, as every tool is."""

    entry_point = "mcp_tools"
    module = "turnwise_mcp_tools"
    registered = "mcp"
    hook = "register_tools"

    @pytest.fixture
    def config(self):
        """One server, which these tests do not start."""
        return McpConfig(servers={"time": ServerConfig(command="python", args=("-m", "mcp_server_time"))})
