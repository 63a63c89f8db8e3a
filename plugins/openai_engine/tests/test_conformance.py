"""Engine conformance with both protocols."""

import pytest

from turnwise_openai_engine.config import OpenAIConfig
from turnwise_testing.probes.engine import EngineProbe
from turnwise_testing.suites.engine import EngineSuite
from turnwise_testing.suites.plugin import PluginSuite


class TestVllmProtocol(EngineSuite):
    """The standard tests, over `/v1/completions`."""

    entry_point = "openai_engine"
    module = "turnwise_openai_engine"
    registered = "openai"

    @pytest.fixture
    def config(self, server):
        """One server."""
        return OpenAIConfig(urls=[server.url], max_context=256)

    @pytest.fixture
    def probe(self):
        """The vocabulary of the server."""
        return EngineProbe(vocab_size=512, num_long_tokens=150)


class TestSglangProtocol(EngineSuite):
    """The standard tests, over `/generate`."""

    entry_point = "openai_engine"
    module = "turnwise_openai_engine"
    registered = "openai"

    @pytest.fixture
    def config(self, server):
        """One server."""
        return OpenAIConfig(urls=[server.url], max_context=256, protocol="sglang")

    @pytest.fixture
    def probe(self):
        """The vocabulary of the server."""
        return EngineProbe(vocab_size=512, num_long_tokens=150)


class TestDiagnostic(PluginSuite):
    """The standard tests of the registration."""

    entry_point = "openai_engine"
    module = "turnwise_openai_engine"
    registered = "openai"
    hook = "register_diagnostics"
