"""`single_turn` passes the conformance suite of agents."""

from turnwise_testing import AgentSuite


class TestSingleTurn(AgentSuite):
    """The suite with default options."""

    entry_point = "single_turn"
    module = "turnwise_single_turn"
    registered = "single_turn"
