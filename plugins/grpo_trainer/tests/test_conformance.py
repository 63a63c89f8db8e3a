"""`train` and `eval` pass the standard suite of plugins."""

from turnwise_testing.suite import PluginSuite


class TestTrain(PluginSuite):
    """`train` keeps the promises of a plugin."""

    entry_point = "grpo_trainer"
    module = "turnwise_grpo_trainer"
    registered = "train"
    hook = "register_commands"


class TestEval(PluginSuite):
    """`eval` keeps the promises of a plugin."""

    entry_point = "grpo_trainer"
    module = "turnwise_grpo_trainer"
    registered = "eval"
    hook = "register_commands"
