"""Engine conformance: around a fake vLLM everywhere, and with vLLM where it is installed."""

import pytest

from turnwise_testing.probes.engine import EngineProbe, letters_of
from turnwise_testing.suites.engine import EngineSuite
from turnwise_testing.suites.plugin import PluginSuite
from turnwise_vllm_engine import VllmConfig


class TestAroundFake(EngineSuite):
    """The standard tests around a fake vLLM."""

    entry_point = "vllm_engine"
    module = "turnwise_vllm_engine"
    registered = "vllm"

    @pytest.fixture
    def make_engine(self, make_fake_engine):
        """Engines around a fake vLLM."""
        return make_fake_engine

    @pytest.fixture
    def probe(self):
        """The vocabulary of the fake."""
        return EngineProbe(vocab_size=512, num_long_tokens=150)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
class TestVllm(EngineSuite):
    """The standard tests with vLLM and the calculator demo's model."""

    entry_point = "vllm_engine"
    module = "turnwise_vllm_engine"
    registered = "vllm"
    shared_engine = True

    @pytest.fixture
    def config(self):
        """A small cache and context."""
        from turnwise_calculator_demo import model_dir

        return VllmConfig(model=model_dir(), max_context=1024, kv_cache_bytes=64 << 20, num_threads=1, grammars=True)

    @pytest.fixture
    def probe(self):
        """The vocabulary of the model, its forward pass, its letters, and requests long enough to interrupt."""
        from turnwise_calculator_demo import model_dir
        from turnwise_testing.references.reference_model import TransformersReference

        return EngineProbe(
            vocab_size=365,
            num_long_tokens=400,
            letters=letters_of(model_dir()),
            reference=TransformersReference(model_dir()),
            logprob_bound=5e-5,
        )


class TestDiagnostic(PluginSuite):
    """The standard tests of the registration."""

    entry_point = "vllm_engine"
    module = "turnwise_vllm_engine"
    registered = "vllm"
    hook = "register_diagnostics"
