"""`single_turn` is an agent as every other."""

from turnwise.testing.agent_suite import AgentSuite


class TestSingleTurn(AgentSuite):
    """The standard suite."""

    entry_point = "single_turn"
    module = "turnwise_single_turn"
    registered = "single_turn"
