"""`wandb` and `mlflow` are observers as every other."""

from turnwise.testing.suite import PluginSuite


class TestWandb(PluginSuite):
    """The standard suite."""

    entry_point = "experiment_trackers"
    module = "turnwise_experiment_trackers"
    registered = "wandb"
    hook = "register_observers"


class TestMlflow(PluginSuite):
    """The standard suite."""

    entry_point = "experiment_trackers"
    module = "turnwise_experiment_trackers"
    registered = "mlflow"
    hook = "register_observers"
