"""`prometheus`, `otel`, `routing_log`, `trace_file` and `mask` are registered as every other part."""

import pytest

from turnwise_observability.config import TraceFileConfig
from turnwise_testing.suites.plugin import PluginSuite


class TestPrometheus(PluginSuite):
    """The standard suite on `prometheus`."""

    entry_point = "observability"
    module = "turnwise_observability"
    registered = "prometheus"
    hook = "register_observers"


class TestOtel(PluginSuite):
    """The standard suite on `otel`."""

    entry_point = "observability"
    module = "turnwise_observability"
    registered = "otel"
    hook = "register_observers"


class TestRoutingLog(PluginSuite):
    """The standard suite on `routing_log`."""

    entry_point = "observability"
    module = "turnwise_observability"
    registered = "routing_log"
    hook = "register_observers"


class TestTraceFile(PluginSuite):
    """The standard suite on `trace_file`."""

    entry_point = "observability"
    module = "turnwise_observability"
    registered = "trace_file"
    hook = "register_observers"

    @pytest.fixture
    def config(self):
        """A path, which has no default."""
        return TraceFileConfig(path="trace.json")


class TestMask(PluginSuite):
    """The standard suite on `mask`."""

    entry_point = "observability"
    module = "turnwise_observability"
    registered = "mask"
    hook = "register_commands"
