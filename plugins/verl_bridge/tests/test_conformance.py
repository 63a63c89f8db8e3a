"""The bridge is a plugin as every other: it registers the engine `verl`, which works inside verl only."""

from turnwise.testing.suite import PluginSuite


class TestVerlBridge(PluginSuite):
    """The standard suite of plugins; an engine's own suite needs a model, which here is verl's."""

    hook = "register_engines"
    entry_point = "verl_bridge"
    module = "turnwise_verl_bridge"
    registered = "verl"
