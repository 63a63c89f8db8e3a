"""Tiny models with random, sharpened weights, and engines around scenarios."""

import asyncio
import threading

import numpy as np
import pytest
import torch
import transformers

from turnwise.protocols import Resources
from turnwise_testing.engines.scenarios import (
    CONTEXT,
    VOCAB_SIZE,
    forward_logprobs,
    generate_together,
    run_scenario,
    simple_request,
)
from turnwise_testing.references.reference_model import TransformersReference, save_random_model
from turnwise_testing.references.vision_reference import VisionReference
from turnwise_tiny_models import byte_level_tokenizer, save_random_vision
from turnwise_transformers_engine import TransformersConfig, TransformersEngine
from turnwise_transformers_engine.fused.decoder import FusedDecoder

CONFIGS = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}


@pytest.fixture(scope="session", autouse=True)
def _fast_tiny_models():
    """Use one thread, which is fastest for tiny models."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def save_model():
    """A function that writes a model of two layers and 512 ids to a directory, and returns the directory."""

    def save(directory, kind="qwen3"):
        config = CONFIGS[kind](
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=512,
            tie_word_embeddings=False,
        )
        return save_random_model(config, directory)

    return save


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """A tokenizer of bytes with some merges, as byte-level BPE has them."""
    return byte_level_tokenizer(['{"name": "Ada", "age": 36, "tags": [true, null]}'] * 3, VOCAB_SIZE)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, save_model, tiny_tokenizer):
    """The directory of a Qwen3 with a tokenizer."""
    directory = save_model(tmp_path_factory.mktemp("qwen3"))
    tiny_tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_reference(tiny_model):
    """The forward pass of the tiny model, with its own and with other weights."""
    return TransformersReference(tiny_model)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory, save_model):
    """The directory of a Llama."""
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def qwen2_5_vl(tmp_path_factory):
    """The forward pass of a tiny Qwen2.5-VL."""
    return VisionReference(save_random_vision("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl")))


@pytest.fixture(scope="session")
def qwen3_vl(tmp_path_factory):
    """The forward pass of a tiny Qwen3-VL."""
    return VisionReference(save_random_vision("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl")))


@pytest.fixture(scope="session")
def other_model(tiny_model):
    """The tiny model with other projections."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight.mul_(0.8).add_(0.05)
    return model


@pytest.fixture(scope="session")
def other_weights(other_model):
    """The weights of `other_model`, as the argument of `update_weights`."""
    return [(name, weight.detach().numpy()) for name, weight in other_model.named_parameters()]


@pytest.fixture(scope="session")
def context():
    """(37,) ids: two full pages, and part of a third."""
    return np.array(CONTEXT)


@pytest.fixture(scope="session")
def ask():
    """A function that returns a request of 16 tokens on the context, unless told otherwise."""
    return simple_request


@pytest.fixture(params=["fused", pytest.param("generic", marks=pytest.mark.slow)])
def decoder(request):
    """
    The decoder of plain requests: tests that use an engine run with each, unless a file overrides this.

    The generic one takes two thirds of their time: it is slow, but for the file `test_transformers_engine.py`.
    """
    return request.param


@pytest.fixture
def serve(decoder):
    """A function that runs `scenario(engine)` on a started engine."""

    def run(model, scenario, **options):
        options = {"max_context": 256, "decoder": decoder, **options}
        config = TransformersConfig(model=model, device="cpu", **options)
        return run_scenario(TransformersEngine(config, Resources()), scenario, timeout_s=120)

    return run


@pytest.fixture
def left_over(decoder):
    """A function that returns the state that a backend still has of requests that have ended."""

    def find(engine):
        backend = engine._backend
        if decoder == "fused":
            return {**backend._rows, **backend.decoder._prefilling}
        unread = [] if backend.manager.output_router.output_queue.empty() else ["unread"]
        return {**backend._requests, **backend._deduplicator._by_context, **dict.fromkeys(unread)}

    return find


@pytest.fixture(scope="session")
def together():
    """A coroutine function that sends requests at the same time and returns their results in order."""
    return generate_together


@pytest.fixture
def in_flight(monkeypatch):
    """
    A coroutine function that waits until a request has some tokens.

    It lets the fused decoder do one step at a time: on a busy machine the decoder's thread could end the request
    between two looks at it.
    """

    async def wait(engine, request_id="a", num_tokens=5):
        steps, done = threading.Semaphore(0), threading.Semaphore(0)
        real = FusedDecoder._step

        def step(decoder):
            steps.acquire()
            real(decoder)
            done.release()

        def enough():
            return request_id in engine._pending and engine._pending[request_id].num_sampled >= num_tokens

        monkeypatch.setattr(FusedDecoder, "_step", step)
        try:
            async with asyncio.timeout(300):
                steps.release()
                while not enough():
                    if done.acquire(blocking=False) and not enough():
                        steps.release()
                    await asyncio.sleep(0.001)
        finally:
            monkeypatch.setattr(FusedDecoder, "_step", real)
            steps.release()  # the step that waits

    return wait


@pytest.fixture(scope="session")
def assert_logprobs():
    """
    A function that compares a result with a forward pass in float32, to 1e-4.

    Filters are those of the request; `part` selects the tokens to compare.
    """

    def check(result, model, token_ids=CONTEXT, part=slice(None), **filters):
        if not isinstance(model, torch.nn.Module):
            model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        expected = forward_logprobs(model, simple_request("a", token_ids, **filters), result.token_ids)
        np.testing.assert_allclose(result.logprobs[part], expected[part], atol=1e-4, rtol=0)

    return check
