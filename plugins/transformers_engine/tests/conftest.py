"""Tiny models with random, sharpened weights, an engine around a scenario, and the truth by a plain forward pass."""

import asyncio
import gc

import numpy as np
import pytest
import torch
import transformers

from turnwise.protocols import Resources
from turnwise.testing.reference_model import TransformersReference, save_random_model
from turnwise.types import GenerateRequest, SamplingParams
from turnwise_transformers_engine import TransformersConfig, TransformersEngine

VOCAB_SIZE = 512
CONFIGS = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}


@pytest.fixture(scope="session", autouse=True)
def _two_shared_cores():
    """More threads make tiny models slower, and `stop` collects garbage among all that torch has imported."""
    torch.set_num_threads(1)
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def save_model():
    """A function that writes a model of two layers and 512 ids into a directory, and returns the directory."""

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
def tiny_model(tmp_path_factory, save_model):
    """Directory of a Qwen3."""
    return save_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def tiny_reference(tiny_model):
    """The tiny model's truth, with its own and with other weights."""
    return TransformersReference(tiny_model)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory, save_model):
    """Directory of a Llama."""
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


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
    """Its weights, as the argument of `update_weights`."""
    return [(name, weight.detach().numpy()) for name, weight in other_model.named_parameters()]


@pytest.fixture(scope="session")
def context():
    """(37,) ids: two full pages and a piece."""
    return np.arange(3, 40) * 11 % VOCAB_SIZE


@pytest.fixture(scope="session")
def ask(context):
    """A function that makes a request of 16 tokens on the context, unless told otherwise."""

    def make(request_id="a", token_ids=context, **sampling):
        params = SamplingParams(**{"max_tokens": 16, **sampling})
        return GenerateRequest(request_id=request_id, trajectory_id="t", token_ids=token_ids, sampling=params)

    return make


@pytest.fixture(scope="session")
def serve():
    """A function that runs `scenario(engine)` on an engine that is started and, whatever happens, stopped."""

    def run(model, scenario, **options):
        config = TransformersConfig(model=model, device="cpu", **{"max_context": 256, **options})

        async def main():
            engine = TransformersEngine(config, Resources())
            await engine.start()
            try:
                async with asyncio.timeout(120):
                    return await scenario(engine)
            finally:
                await engine.stop()

        return asyncio.run(main())

    return run


@pytest.fixture(scope="session")
def together():
    """A coroutine function that sends requests at once and returns their results in order."""

    async def send(engine, requests):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.generate(each)) for each in requests]
        return [task.result() for task in tasks]

    return send


@pytest.fixture(scope="session")
def in_flight():
    """A coroutine function that waits until a request has got some tokens."""

    async def wait(engine, request_id="a", num_tokens=5):
        def enough():
            return request_id in engine._pending and engine._pending[request_id].num_sampled >= num_tokens

        async with asyncio.timeout(30):
            while not enough():  # noqa: ASYNC110 - the engine tells nobody how far it is
                await asyncio.sleep(0.001)

    return wait


@pytest.fixture(scope="session")
def assert_logprobs(context):
    """
    A function that compares a result with a plain forward pass in float32, to 1e-4.

    Filters are those of vLLM: temperature, then the `top_k` best, then the fewest best that hold `top_p`. `part` picks
    the tokens to compare.
    """

    def check(result, model, token_ids=context, part=slice(None), **filters):
        expected = forward_logprobs(model, token_ids, result.token_ids, **filters)
        np.testing.assert_allclose(result.logprobs[part], expected[part], atol=1e-4, rtol=0)

    return check


@torch.no_grad()
def forward_logprobs(model, context, token_ids, temperature=1.0, top_k=-1, top_p=1.0):
    if not isinstance(model, torch.nn.Module):
        model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor(np.concatenate([context, token_ids]).astype(np.int64))
    logits = model(ids[None]).logits[0, len(context) - 1 : -1].double() / temperature
    if top_k != -1:
        logits[logits < logits.topk(top_k).values[:, -1:]] = -torch.inf
    values, order = logits.softmax(-1).sort(descending=True)
    outside = values.cumsum(-1) - values >= top_p
    logits[torch.zeros_like(outside).scatter(-1, order, outside)] = -torch.inf
    return logits.log_softmax(-1).gather(-1, ids[len(context) :, None])[:, 0].numpy()
