"""The trackers pass the plugin conformance suite."""

from turnwise_testing.suites.plugin import PluginSuite


class TestWandb(PluginSuite):
    """The standard suite on `wandb`."""

    entry_point = "experiment_trackers"
    module = "turnwise_experiment_trackers"
    registered = "wandb"
    hook = "register_observers"


class TestMlflow(PluginSuite):
    """The standard suite on `mlflow`."""

    entry_point = "experiment_trackers"
    module = "turnwise_experiment_trackers"
    registered = "mlflow"
    hook = "register_observers"


class TestTensorboard(PluginSuite):
    """The standard suite on `tensorboard`."""

    entry_point = "experiment_trackers"
    module = "turnwise_experiment_trackers"
    registered = "tensorboard"
    hook = "register_observers"
