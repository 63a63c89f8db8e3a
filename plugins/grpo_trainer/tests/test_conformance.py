"""The commands, losses and advantages of the trainer pass the conformance suites."""

from turnwise_testing import AdvantageSuite, LossSuite
from turnwise_testing.suites.plugin import PluginSuite


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


class TestExport(PluginSuite):
    """`export` keeps the promises of a plugin."""

    entry_point = "grpo_trainer"
    module = "turnwise_grpo_trainer"
    registered = "export"
    hook = "register_commands"


class TestPpoClip(LossSuite):
    """`ppo_clip` keeps the promises of a loss."""

    entry_point = "grpo_trainer"
    module = "turnwise_grpo_trainer"
    registered = "ppo_clip"


class TestDualClip(LossSuite):
    """`dual_clip` keeps the promises of a loss."""

    entry_point = "grpo_trainer"
    module = "turnwise_grpo_trainer"
    registered = "dual_clip"


class TestGspo(LossSuite):
    """`gspo` keeps the promises of a loss."""

    entry_point = "grpo_trainer"
    module = "turnwise_grpo_trainer"
    registered = "gspo"


class TestCispo(LossSuite):
    """`cispo` keeps the promises of a loss."""

    entry_point = "grpo_trainer"
    module = "turnwise_grpo_trainer"
    registered = "cispo"


class TestPathCredit(AdvantageSuite):
    """`path_credit` keeps the promises of an advantage."""

    entry_point = "grpo_trainer"
    module = "turnwise_grpo_trainer"
    registered = "path_credit"
