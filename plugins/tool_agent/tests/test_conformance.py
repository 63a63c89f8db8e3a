"""`tool_agent` passes the conformance suite of agents."""

from turnwise_testing import AgentSuite


class TestToolAgent(AgentSuite):
    """The suite with default options."""

    entry_point = "tool_agent"
    module = "turnwise_tool_agent"
    registered = "tool_agent"
