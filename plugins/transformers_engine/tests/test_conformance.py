"""Conformance of the embedded engine."""

import pytest
from transformers import AutoTokenizer

from turnwise_testing.inputs.vision import draw_picture
from turnwise_testing.probes.engine import EngineProbe, Letters
from turnwise_testing.suites.engine import EngineSuite
from turnwise_testing.suites.plugin import PluginSuite
from turnwise_transformers_engine import TransformersConfig


class TestTransformers(EngineSuite):
    """The standard tests, on a tiny Qwen3 on the CPU."""

    entry_point = "transformers_engine"
    module = "turnwise_transformers_engine"
    registered = "transformers"
    logprob_bound = 1e-4

    @pytest.fixture
    def config(self, tiny_model):
        """A small cache and context."""
        return TransformersConfig(model=tiny_model, device="cpu", max_context=256)

    @pytest.fixture
    def probe(self, tiny_reference, tiny_tokenizer):
        """The vocabulary of the tiny model, its forward pass, and texts of one token."""
        ids = {text: tiny_tokenizer.convert_tokens_to_ids(text) for text in ("a", "b", "7")}
        letters = Letters(ids=ids, end_id=tiny_tokenizer.eos_token_id, decode=tiny_tokenizer.decode)
        return EngineProbe(vocab_size=512, reference=tiny_reference, letters=letters)


@pytest.mark.slow
class TestGenericDecoder(TestTransformers):
    """The same with the decoder of transformers, which the first class does not use for this model."""

    @pytest.fixture
    def config(self, tiny_model):
        """A small cache and context."""
        return TransformersConfig(model=tiny_model, device="cpu", max_context=256, decoder="generic")


class Vision(EngineSuite):
    """A vision-language model, and its pictures."""

    entry_point = "transformers_engine"
    module = "turnwise_transformers_engine"
    registered = "transformers"
    logprob_bound = 1e-4

    @pytest.fixture
    def config(self, qwen2_5_vl):
        """A small context."""
        return TransformersConfig(model=qwen2_5_vl.path, device="cpu", max_context=256)

    @pytest.fixture
    def probe(self, qwen2_5_vl):
        """The model's forward pass, and four pictures."""
        pictures = [draw_picture(0), draw_picture(1), draw_picture(2, 16, 40), draw_picture(3, 8, 8, "JPEG")]
        tokenizer = AutoTokenizer.from_pretrained(qwen2_5_vl.path)
        ids = {text: tokenizer.convert_tokens_to_ids(text) for text in ("a", "b", "7")}
        return EngineProbe(
            vocab_size=len(tokenizer),
            reference=qwen2_5_vl,
            letters=Letters(ids=ids, end_id=tokenizer.eos_token_id, decode=tokenizer.decode),
            pictures=qwen2_5_vl.probe(pictures),
        )


class TestVision(Vision):
    """The checks of pictures."""

    media_only = True


@pytest.mark.slow
class TestVisionText(Vision):
    """The checks of text with a model that sees: all of them, as with the model of text."""


class TestDiagnostic(PluginSuite):
    """The standard tests of the registration."""

    entry_point = "transformers_engine"
    module = "turnwise_transformers_engine"
    registered = "transformers"
    hook = "register_diagnostics"
