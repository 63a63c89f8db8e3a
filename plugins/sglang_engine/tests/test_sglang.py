"""The real SGLang: what it samples is what a plain forward pass of the model says, update after update."""

import asyncio
import copy
import os
import signal

import numpy as np
import pytest

from turnwise.errors import EngineError, ReplicaDiedError
from turnwise.protocols import Resources
from turnwise.testing.engine_load_checks import updates_under_load
from turnwise.testing.engine_probe import EngineProbe
from turnwise.testing.reference_model import TransformersReference, save_random_model
from turnwise.types import FinishReason, GenerateRequest, SamplingParams
from turnwise_sglang_engine import SglangConfig, SglangEngine

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

VOCAB_SIZE = 365
LOGPROB_BOUND = 5e-5
"""Nats, float32 against float32."""
NUM_UPDATES = 100


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A tied Qwen3 of two layers with random, sharpened weights, and the tokenizer of the calculator demo."""
    import shutil

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
    """Return (len(ids),) log-probabilities after temperature and the two filters, each on all ids as in SGLang."""
    import torch

    sampling = asked.sampling
    row = torch.tensor([[*asked.token_ids, *ids]])
    with torch.no_grad():
        logits = model(row).logits[0, len(asked.token_ids) - 1 : -1].double() / sampling.temperature
    values, order = logits.softmax(-1).sort(descending=True)
    outside = values.cumsum(-1) - values > sampling.top_p
    if sampling.top_k != -1:
        outside[:, sampling.top_k :] = True
    logits[torch.zeros_like(outside).scatter(-1, order, outside)] = -torch.inf
    return logits.log_softmax(-1).gather(-1, row[0, -len(ids) :, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def truth(model_path):
    """The model's forward pass, under its own and under other weights, on one of the cores that SGLang uses too."""
    import torch

    torch.set_num_threads(1)
    return TransformersReference(model_path)


@pytest.fixture(scope="module")
def runner():
    """One event loop for the engine that all tests share."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(model_path, runner):
    """One engine for all tests of this file: it takes a while to start. Stop strings are on; nothing else differs."""
    config = SglangConfig(
        model=model_path,
        device="cpu",
        max_context=512,
        num_threads=1,
        stop_strings=True,
        weight_bucket_bytes=100_000,
    )
    engine = SglangEngine(config, Resources())
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


def test_each_request_draws_as_it_asked_in_any_company(engine, runner, truth):
    """Greedy, plain and filtered requests in one batch: SGLang has one sampler for each, and another for a mixture."""
    ways = [{"temperature": 0.0}, {}, {"temperature": 0.5}, {"top_p": 0.7}, {"top_k": 3}]
    requests = [request(i, **ways[i % 5]) for i in range(20)]
    alone = [each.token_ids.tolist() for each in runner.run(together(engine, requests[::5]))]

    results = runner.run(together(engine, requests))

    assert alone == [each.token_ids.tolist() for each in results[::5]]
    assert {0.0} == {value for each in results[::5] for value in each.logprobs.tolist()}
    for each, result in zip(requests, results, strict=True):
        if each.sampling.temperature:
            expected = logprobs_of(truth.model(variant=0), each, result.token_ids)
            np.testing.assert_allclose(result.logprobs, expected, atol=LOGPROB_BOUND, rtol=0)


def test_a_known_context_is_not_read_again(engine, runner, truth, first_weights):
    """The count is told, and an update empties the cache."""
    context = np.arange(100) % VOCAB_SIZE
    params = SamplingParams(max_tokens=4, temperature=0.0)
    ask = GenerateRequest(request_id="p", trajectory_id="t", token_ids=context, sampling=params)

    async def scenario():
        # Nothing of other tests, whose contexts may begin alike.
        await engine.update_weights(truth.weights(variant=0), 0)
        counts = [(await engine.generate(ask)).num_cached_tokens for _ in range(2)]
        await engine.update_weights(truth.weights(variant=1), 1)
        return [*counts, (await engine.generate(ask)).num_cached_tokens]

    assert [0, 99, 0] == runner.run(scenario())


def test_a_stop_string_ends_a_turn(engine, runner):
    """The ids that spell it stay in the output, and it is named."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engine._spec.path)
    free = runner.run(engine.generate(request(3, temperature=0.0, max_tokens=64)))
    texts = [tokenizer.decode([each]) for each in free.token_ids]
    stop = next(text for text in texts[10:] if text.strip() and texts.index(text) >= 5)

    result = runner.run(engine.generate(request(3, temperature=0.0, max_tokens=64, stop=(stop,))))

    assert (FinishReason.STOP, stop) == (result.finish_reason, result.stop_reason)
    assert free.token_ids[: len(result.token_ids)].tolist() == result.token_ids.tolist()
    assert stop in tokenizer.decode(result.token_ids)
    assert stop not in tokenizer.decode(result.token_ids[:-1])


def test_the_models_end_of_turn_ends_only_turns_that_ask_for_it(engine, runner, truth):
    """The tokenizer's end of turn, of small probability: drawn until it comes, and gone on behind."""
    eos = 2
    asked = [request(i, temperature=3.0, max_tokens=64, stop_token_ids=(361,)) for i in range(24)]

    results = runner.run(together(engine, asked))

    behind = [each for each in results if eos in each.token_ids[:-1]]
    assert behind
    for each in results:
        assert each.finish_reason is (FinishReason.STOP if each.token_ids[-1] == 361 else FinishReason.LENGTH)
    for each, result in zip(asked, results, strict=True):
        expected = logprobs_of(truth.model(variant=0), each, result.token_ids)
        np.testing.assert_allclose(result.logprobs, expected, atol=LOGPROB_BOUND, rtol=0)


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


def test_some_layers_can_be_replaced(engine, runner, truth, first_weights):
    """The others keep what they had, also when a part of what SGLang fuses comes."""
    import torch

    part = [(name, weight) for name, weight in truth.weights(variant=3) if "layers.1.self_attn.k_proj" in name]
    asked = request(4)

    async def scenario():
        await engine.update_weights(part, 3)
        return await engine.generate(asked)

    result = runner.run(scenario())
    mixed = copy.deepcopy(truth.model(variant=0))
    mixed.load_state_dict({name: torch.from_numpy(weight) for name, weight in part}, strict=False)
    expected = logprobs_of(mixed, asked, result.token_ids)
    assert 3 == result.weight_version
    np.testing.assert_allclose(result.logprobs, expected, atol=LOGPROB_BOUND, rtol=0)


def test_ids_outside_the_vocabulary_do_not_reach_sglang(engine, runner):
    """They would end its scheduler."""
    bad = GenerateRequest(request_id="b", trajectory_id="t", token_ids=[VOCAB_SIZE], sampling=SamplingParams())

    with pytest.raises(EngineError, match="ids outside the vocabulary of 365"):
        runner.run(engine.generate(bad))
    assert 32 == len(runner.run(engine.generate(request(1))).token_ids)


def test_a_dead_scheduler_is_noticed(engine, runner):
    """The last test: SGLang ends its whole process when a part of it has gone, and the replica says so."""
    import psutil

    async def failure(asked):
        with pytest.raises(ReplicaDiedError) as caught:
            await engine.generate(asked)
        return str(caught.value)

    async def scenario():
        children = psutil.Process(engine._server._process.pid).children(recursive=True)
        (scheduler,) = [each for each in children if "scheduler" in " ".join(each.cmdline())]
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(failure(request(0, max_tokens=400)))
            await asyncio.sleep(0.1)
            os.kill(scheduler.pid, signal.SIGKILL)
        later = await failure(request(1))
        await engine.stop()
        return waiting.result(), later, [each for each in children if each.is_running() and each.status() != "zombie"]

    waiting, later, left = runner.run(scenario())

    assert waiting.startswith("SGLang's process died: ")
    assert waiting == later
    assert left == []
