"""The reward's plugin passes the conformance suite; `core/tests/episode/test_records.py` plays episodes that report."""

from turnwise_testing.suites.plugin import PluginSuite


class TestReported(PluginSuite):
    """The suite of all plugins."""

    entry_point = "reported_reward"
    module = "turnwise_reported_reward"
    hook = "register_rewards"
    registered = "reported"
