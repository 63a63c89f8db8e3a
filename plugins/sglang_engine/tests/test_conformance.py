"""Engine conformance: with a fake SGLang everywhere, and with SGLang where it is installed."""

import pytest

from turnwise_sglang_engine import SglangConfig
from turnwise_testing.probes.engine import EngineProbe, letters_of
from turnwise_testing.suites.engine import EngineSuite
from turnwise_testing.suites.plugin import PluginSuite

pytestmark = pytest.mark.usefixtures("starts_a_process")


class TestAroundFake(EngineSuite):
    """The standard tests of the engine and its process, with a fake SGLang."""

    entry_point = "sglang_engine"
    module = "turnwise_sglang_engine"
    registered = "sglang"

    @pytest.fixture
    def make_engine(self, make_fake_engine):
        """Engines around the fake SGLang."""
        return make_fake_engine

    @pytest.fixture
    def probe(self):
        """The vocabulary of the fake."""
        return EngineProbe(vocab_size=512)


@pytest.mark.sglang
@pytest.mark.slow
class TestSglang(EngineSuite):
    """The standard tests with SGLang and the calculator demo's model."""

    entry_point = "sglang_engine"
    module = "turnwise_sglang_engine"
    registered = "sglang"
    shared_engine = True

    @pytest.fixture
    def config(self):
        """A small context, and one thread for the tiny model."""
        from turnwise_calculator_demo import model_dir

        return SglangConfig(model=model_dir(), device="cpu", max_context=1024, num_threads=1, grammars=True)

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
            logprob_bound=2e-5,
            timeout_s=300.0,
        )


@pytest.mark.sglang
@pytest.mark.slow
class TestSglangVision(EngineSuite):
    """The checks of pictures, with SGLang and a vision-language model. The class above runs those of text."""

    entry_point = "sglang_engine"
    module = "turnwise_sglang_engine"
    registered = "sglang"
    shared_engine = True
    media_only = True

    @pytest.fixture
    def config(self, qwen3_vl):
        """A small context, and the tokenizer: with it SGLang sends arrays of pictures by shared memory."""
        return SglangConfig(model=qwen3_vl.path, device="cpu", max_context=512, num_threads=1, stop_strings=True)

    @pytest.fixture
    def probe(self, qwen3_vl):
        """The model's forward pass, and four pictures, of which one has to be scaled down."""
        from turnwise_testing.inputs.vision import draw_picture

        sizes = [(56, 56), (56, 56), (150, 120), (28, 28)]
        pictures = [draw_picture(number, *size) for number, size in enumerate(sizes)]
        vocab_size = qwen3_vl.model(variant=0).config.text_config.vocab_size
        return EngineProbe(
            vocab_size=vocab_size,
            num_long_tokens=400,
            reference=qwen3_vl,
            logprob_bound=1e-4,
            timeout_s=300.0,
            pictures=qwen3_vl.probe(pictures),
        )


class TestDiagnostic(PluginSuite):
    """The standard tests of the registration."""

    entry_point = "sglang_engine"
    module = "turnwise_sglang_engine"
    registered = "sglang"
    hook = "register_diagnostics"
