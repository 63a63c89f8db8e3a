"""The SGLang engine does what every engine must do: with a pretended SGLang everywhere, and with the real one."""

import pytest

from turnwise.testing.engine_probe import EngineProbe
from turnwise.testing.engine_suite import EngineSuite
from turnwise_sglang_engine import SglangConfig


class TestPretended(EngineSuite):
    """The standard tests, on the engine, its process and what is between them."""

    entry_point = "sglang_engine"
    module = "turnwise_sglang_engine"
    registered = "sglang"

    @pytest.fixture
    def make_engine(self, make_pretended):
        """Engines whose process runs the pretended SGLang."""
        return make_pretended

    @pytest.fixture
    def probe(self):
        """The vocabulary of the pretended model."""
        return EngineProbe(vocab_size=512)


@pytest.mark.sglang
@pytest.mark.slow
class TestSglang(EngineSuite):
    """The standard tests, with SGLang and the model of the calculator demo."""

    entry_point = "sglang_engine"
    module = "turnwise_sglang_engine"
    registered = "sglang"
    shared_engine = True

    @pytest.fixture
    def config(self):
        """A small context, and one thread: the model is tiny."""
        from turnwise_calculator_demo import model_dir

        return SglangConfig(model=model_dir(), device="cpu", max_context=1024, num_threads=1)

    @pytest.fixture
    def probe(self):
        """The vocabulary of the model, a forward pass of it, and requests long enough to be caught in flight."""
        from turnwise.testing.reference_model import TransformersReference
        from turnwise_calculator_demo import model_dir

        return EngineProbe(
            vocab_size=365,
            num_long_tokens=400,
            reference=TransformersReference(model_dir()),
            logprob_bound=2e-5,
            timeout_s=300.0,
        )
