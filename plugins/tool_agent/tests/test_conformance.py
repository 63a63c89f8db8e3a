"""`tool_agent` is an agent as every other."""

from turnwise.testing.agent_suite import AgentSuite


class TestToolAgent(AgentSuite):
    """The standard suite."""

    entry_point = "tool_agent"
    module = "turnwise_tool_agent"
    registered = "tool_agent"
