"""The real vLLM: what it samples is what a plain forward pass of the model says, update after update."""

import asyncio
import copy
import shutil

import numpy as np
import pytest

from turnwise.errors import EngineError, TornWeightsError
from turnwise.protocols import Resources
from turnwise.testing.engine_load_checks import updates_under_load
from turnwise.testing.engine_probe import EngineProbe
from turnwise.testing.reference_model import TransformersReference, save_random_model
from turnwise.types import FinishReason, GenerateRequest, SamplingParams
from turnwise_vllm_engine import VllmConfig, VllmEngine
from turnwise_vllm_engine.weights import Expected

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

VOCAB_SIZE = 365
LOGPROB_BOUND = 5e-5
"""Nats, float32 against float32; the largest that was seen is a fifth of it."""
NUM_UPDATES = 100


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A tied Qwen3 of two layers with random, sharpened weights, and the tokenizer of the calculator demo."""
    import transformers

    from turnwise_calculator_demo import model_dir

    path = tmp_path_factory.mktemp("qwen3")
    config = transformers.Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    save_random_model(config, path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir() / name, path)
    return path


def logprobs_of(model, asked, ids):
    """Return (len(ids),) log-probabilities after temperature, top-k and top-p, in vLLM's order."""
    import torch

    sampling = asked.sampling
    row = torch.tensor([[*asked.token_ids, *ids]])
    with torch.no_grad():
        logits = model(row).logits[0, len(asked.token_ids) - 1 : -1].double() / sampling.temperature
    if sampling.top_k != -1:
        logits[logits < logits.topk(sampling.top_k).values[:, -1:]] = -torch.inf
    values, order = logits.softmax(-1).sort(descending=True)
    outside = values.cumsum(-1) - values >= sampling.top_p
    logits[torch.zeros_like(outside).scatter(-1, order, outside)] = -torch.inf
    return logits.log_softmax(-1).gather(-1, row[0, -len(ids) :, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def truth(model_path):
    """The model's forward pass, under its own and under other weights."""
    return TransformersReference(model_path)


@pytest.fixture(scope="module")
def runner():
    """One event loop for the engine that all tests share."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(model_path, runner):
    """One engine for all tests of this file: it takes a while to start."""
    config = VllmConfig(
        model=model_path,
        max_context=512,
        kv_cache_bytes=64 << 20,
        num_threads=1,
        weight_bucket_bytes=100_000,
        engine_args={"block_size": 32},
    )
    engine = VllmEngine(config, Resources())
    runner.run(engine.start())
    yield engine
    runner.run(engine.stop())


@pytest.fixture
def first_weights(engine, runner, truth):
    """Leave the engine with the weights that it began with."""
    yield
    runner.run(engine.update_weights(truth.weights(variant=0), 0))


def request(number, **sampling):
    context = np.random.default_rng(number).integers(0, VOCAB_SIZE, 5 + number % 60)
    params = SamplingParams(**{"max_tokens": 32, **sampling})
    return GenerateRequest(request_id=f"r{number}", trajectory_id="t", token_ids=context, sampling=params)


async def together(engine, requests):
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(each)) for each in requests]
    return [task.result() for task in tasks]


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 1.5, "top_k": 40, "top_p": 0.9}],
    ids=str,
)
def test_logprobs_are_those_of_the_distribution_drawn_from(engine, runner, truth, sampling):
    """After temperature, top-k and top-p, to 5e-5 nats, for 32 requests at once."""
    requests = [request(i, **sampling) for i in range(32)]

    results = runner.run(together(engine, requests))

    errors = [
        np.abs(logprobs_of(truth.model(variant=0), each, result.token_ids) - result.logprobs).max()
        for each, result in zip(requests, results, strict=True)
    ]
    print(f"largest difference of {32 * 32} log-probabilities with {sampling}: {max(errors):.2g}")
    assert max(errors) < LOGPROB_BOUND


def test_greedy_logprobs_are_zero_also_beside_others(engine, runner):
    """vLLM has one sampler for a batch of greedy requests and another for a mixed one."""
    alone = runner.run(together(engine, [request(i, temperature=0.0) for i in range(4)]))
    mixed = runner.run(together(engine, [request(i, temperature=float(i >= 4)) for i in range(8)]))

    assert [each.token_ids.tolist() for each in alone] == [each.token_ids.tolist() for each in mixed[:4]]
    assert {0.0} == {value for each in alone + mixed[:4] for value in each.logprobs.tolist()}
    assert min(mixed[4].logprobs) < 0


def test_a_seed_holds_in_any_company(engine, runner):
    """The same seed and context give the same ids alone, in a batch, and with a prefix from the cache."""
    alone = runner.run(engine.generate(request(50, seed=7)))
    crowd = [request(50, seed=7), *(request(i, seed=i) for i in range(20))]
    again = runner.run(together(engine, crowd))[0]

    assert alone.token_ids.tolist() == again.token_ids.tolist()
    assert again.num_cached_tokens > 0


def test_whole_pages_of_a_known_context_are_not_read_again(engine, runner, truth, first_weights):
    """The count is told, and an update empties the cache."""
    context = np.arange(100) % VOCAB_SIZE
    ask = GenerateRequest(
        request_id="p", trajectory_id="t", token_ids=context, sampling=SamplingParams(max_tokens=4, temperature=0.0)
    )

    async def scenario():
        counts = [(await engine.generate(ask)).num_cached_tokens for _ in range(2)]
        await engine.update_weights(truth.weights(variant=1), 1)
        return [*counts, (await engine.generate(ask)).num_cached_tokens]

    assert [0, 96, 0] == runner.run(scenario())


def test_a_stop_string_ends_a_turn(engine, runner):
    """The ids that spell it stay in the output, and it is named."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engine._spec.path)
    free = runner.run(engine.generate(request(3, temperature=0.0, max_tokens=64)))
    texts = [tokenizer.decode([each]) for each in free.token_ids]
    stop = next(text for text in texts[10:] if text.strip() and texts.index(text) >= 5)

    result = runner.run(engine.generate(request(3, temperature=0.0, max_tokens=64, stop=(stop,))))

    assert engine.capabilities.stop_strings
    assert (FinishReason.STOP, stop) == (result.finish_reason, result.stop_reason)
    assert free.token_ids[: len(result.token_ids)].tolist() == result.token_ids.tolist()
    assert stop in tokenizer.decode(result.token_ids)
    assert stop not in tokenizer.decode(result.token_ids[:-1])


def test_ids_outside_the_vocabulary_do_not_reach_vllm(engine, runner):
    """Without a tokenizer they would end its process."""
    bad = GenerateRequest(request_id="b", trajectory_id="t", token_ids=[VOCAB_SIZE], sampling=SamplingParams())

    with pytest.raises(EngineError, match="ids outside the vocabulary of 365"):
        runner.run(engine.generate(bad))
    assert 32 == len(runner.run(engine.generate(request(1))).token_ids)


def test_a_hundred_updates_under_load(engine, runner, truth):
    """Every token of every answer is what a greedy replay gives under the weights of the version that it claims."""
    probe = EngineProbe(
        vocab_size=VOCAB_SIZE, num_long_tokens=100, reference=truth, logprob_bound=LOGPROB_BOUND, timeout_s=300.0
    )

    figures = runner.run(updates_under_load(engine, probe, num_updates=NUM_UPDATES))

    print(figures)
    figures.expect_right()
    assert 0 == engine.stats()["num_running"]
    assert figures.num_right_before < 0.5 * figures.num_tokens_before
    assert figures.num_mixed > figures.num_answers / 2
    assert figures.num_versions > 0.9 * NUM_UPDATES


def test_torn_weights_are_mended_by_a_whole_update(engine, runner, truth, first_weights):
    """vLLM fails in the last bucket, when layers have changed: nothing is served until all weights have come."""
    weights = truth.weights(variant=5)
    broken = [(name, weight[:1] if name == "model.norm.weight" else weight) for name, weight in weights]

    async def scenario():
        expected, engine._expected = engine._expected, Expected({})
        with pytest.raises(TornWeightsError, match="failed half-way"):
            await engine.update_weights(broken, 5)
        engine._expected = expected
        with pytest.raises(TornWeightsError, match="failed half-way"):
            await engine.generate(request(0))
        with pytest.raises(EngineError, match="weights are missing"):
            await engine.update_weights(weights[:1], 6)
        await engine.update_weights(weights, 5)
        return await together(engine, [request(i) for i in range(8)])

    for asked, result in zip([request(i) for i in range(8)], runner.run(scenario()), strict=True):
        expected = logprobs_of(truth.model(variant=5), asked, result.token_ids)
        assert 5 == result.weight_version
        np.testing.assert_allclose(result.logprobs, expected, atol=LOGPROB_BOUND, rtol=0)


def test_some_layers_can_be_replaced(engine, runner, truth, first_weights):
    """The others keep what they had."""
    import torch

    part = [(name, weight) for name, weight in truth.weights(variant=3) if "layers.1." in name]

    async def scenario():
        await engine.update_weights(part, 3)
        return await engine.generate(request(4))

    result = runner.run(scenario())
    asked = request(4)
    mixed = copy.deepcopy(truth.model(variant=0))
    mixed.load_state_dict({name: torch.from_numpy(weight) for name, weight in part}, strict=False)
    expected = logprobs_of(mixed, asked, result.token_ids)
    np.testing.assert_allclose(result.logprobs, expected, atol=LOGPROB_BOUND, rtol=0)


def test_a_dead_process_is_noticed(model_path, runner):
    """A replica whose engine process was killed says so, in flight and afterwards."""
    import os
    import signal

    from turnwise.errors import ReplicaDiedError

    config = VllmConfig(model=model_path, max_context=512, kv_cache_bytes=64 << 20, num_threads=1)
    engine = VllmEngine(config, Resources())

    async def failure(asked):
        with pytest.raises(ReplicaDiedError) as caught:
            await engine.generate(asked)
        return str(caught.value)

    async def scenario():
        await engine.start()
        (process,) = engine._running.llm.engine_core.resources.engine_manager.processes
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(failure(request(0, max_tokens=400)))
            await asyncio.sleep(0.1)
            os.kill(process.pid, signal.SIGKILL)
        later = await failure(request(1))
        await engine.stop()
        return waiting.result(), later

    texts = runner.run(scenario())

    assert all(text.startswith("vLLM's processes have ended: EngineDeadError: ") for text in texts)
