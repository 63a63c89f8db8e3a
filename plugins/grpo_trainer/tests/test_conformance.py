"""`train` and `eval` are commands as every other."""

from turnwise.testing.suite import PluginSuite


class TestTrain(PluginSuite):
    """The standard suite."""

    entry_point = "grpo_trainer"
    module = "turnwise_grpo_trainer"
    registered = "train"
    hook = "register_commands"


class TestEval(PluginSuite):
    """The standard suite."""

    entry_point = "grpo_trainer"
    module = "turnwise_grpo_trainer"
    registered = "eval"
    hook = "register_commands"
