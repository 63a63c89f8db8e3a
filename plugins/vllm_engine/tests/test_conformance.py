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


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
class TestVllmVision(EngineSuite):
    """The checks of pictures, with vLLM and a vision-language model. The class above runs those of text."""

    entry_point = "vllm_engine"
    module = "turnwise_vllm_engine"
    registered = "vllm"
    shared_engine = True
    media_only = True

    @pytest.fixture
    def config(self, qwen2_5_vl):
        """A small cache and context."""
        return VllmConfig(model=qwen2_5_vl.path, max_context=512, kv_cache_bytes=64 << 20, num_threads=1)

    @pytest.fixture
    def probe(self, qwen2_5_vl):
        """The model's forward pass, and four pictures, of which one has to be scaled down."""
        from turnwise_testing.inputs.vision import draw_picture

        pictures = [draw_picture(0), draw_picture(1), draw_picture(2, 100, 90), draw_picture(3, 8, 8, "JPEG")]
        vocab_size = qwen2_5_vl.model(variant=0).config.text_config.vocab_size
        return EngineProbe(
            vocab_size=vocab_size,
            num_long_tokens=400,
            reference=qwen2_5_vl,
            logprob_bound=1e-4,
            pictures=qwen2_5_vl.probe(pictures),
        )


class TestDiagnostic(PluginSuite):
    """The standard tests of the registration."""

    entry_point = "vllm_engine"
    module = "turnwise_vllm_engine"
    registered = "vllm"
    hook = "register_diagnostics"
