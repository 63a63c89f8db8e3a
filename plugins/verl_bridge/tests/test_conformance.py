"""The bridge passes the plugin conformance suite; it registers the engine `verl`."""

from turnwise_testing.suites.plugin import PluginSuite


class TestVerlBridge(PluginSuite):
    """The standard suite of plugins; the engine suite would need verl's servers."""

    hook = "register_engines"
    entry_point = "verl_bridge"
    module = "turnwise_verl_bridge"
    registered = "verl"
