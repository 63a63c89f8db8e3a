"""Samples of the embedded engine, and requests that it refuses."""

import asyncio

import numpy as np
import pytest
import torch
import transformers

from turnwise.errors import EngineError
from turnwise.protocols import Resources
from turnwise.types import FinishReason, SamplingParams
from turnwise_testing.engines.scenarios import VOCAB_SIZE
from turnwise_transformers_engine import TransformersConfig, TransformersEngine
from turnwise_transformers_engine.layouts import slot_cache
from turnwise_transformers_engine.manager.sampling import request_options


@pytest.fixture(params=["fused", "generic"])
def decoder(request):
    """Both decoders, also in the quick tests."""
    return request.param


@pytest.mark.many_cases(4)
@pytest.mark.parametrize("kind", ["tiny_model", "tiny_llama"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_logprobs_over_turns_equal_a_forward_pass(kind, temperature, request, serve, ask, context, assert_logprobs):
    """Over three turns with the prefix cache, log-probabilities are within 1e-4 of a forward pass."""
    model = request.getfixturevalue(kind)

    async def scenario(engine):
        token_ids, turns = context, []
        for turn in range(3):
            result = await engine.generate(ask(f"turn-{turn}", token_ids, temperature=temperature, max_tokens=24))
            turns.append((token_ids, result))
            token_ids = np.concatenate([token_ids, result.token_ids, context[:5] + turn])
        return turns

    turns = serve(model, scenario)

    for token_ids, result in turns:
        assert_logprobs(result, model, token_ids, temperature=temperature)
    assert [result.num_cached_tokens > 0 for _, result in turns] == [False, True, True]


def test_a_model_is_copied_for_layouts_only_if_another_decoder_runs_it(tiny_model, serve, ask, decoder, monkeypatch):
    """The fused decoder runs no module of the model, so the copy can wait for a request with a layout."""
    copies = []
    copy_model = slot_cache._copy_with_shared_tensors
    monkeypatch.setattr(slot_cache, "_copy_with_shared_tensors", lambda model: copies.append(1) or copy_model(model))

    async def scenario(engine):
        at_start = len(copies)
        await engine.generate(ask())
        return at_start, len(copies)

    expected = 0 if decoder == "fused" else 1
    assert serve(tiny_model, scenario) == (expected, expected)


def test_eager_attention_gives_the_same_distribution(tiny_model, serve, ask, assert_logprobs):
    """`attn_implementation` and `num_threads` do not change the distribution."""
    options = {"attn_implementation": "eager", "num_threads": 1, "decoder": "auto"}
    result = serve(tiny_model, lambda engine: engine.generate(ask()), **options)

    assert_logprobs(result, tiny_model)


def test_half_precision_runs_on_a_cpu(tiny_model, serve, ask):
    """Weights and cache may be bfloat16."""
    result = serve(tiny_model, lambda engine: engine.generate(ask()), dtype="bfloat16", decoder="auto")

    assert len(result.token_ids) == 16
    assert np.isfinite(result.logprobs).all()


def test_prefix_caching_can_be_disabled(tiny_model, serve, ask, assert_logprobs):
    """No tokens are cached then, and log-probabilities are the same."""

    async def scenario(engine):
        return [await engine.generate(ask(str(i))) for i in range(2)]

    results = serve(tiny_model, scenario, prefix_caching=False)

    assert [result.num_cached_tokens for result in results] == [0, 0]
    assert_logprobs(results[1], tiny_model)


def test_filters_apply_per_request(tiny_model, serve, ask, together, assert_logprobs):
    """Requests with and without filters share a batch, and each has its own distribution."""
    options = [{}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 8, "top_p": 0.8, "temperature": 1.7}, {"temperature": 0.3}]

    results = serve(
        tiny_model, lambda engine: together(engine, [ask(str(i), **each) for i, each in enumerate(options)])
    )

    for each, result in zip(options, results, strict=True):
        assert_logprobs(result, tiny_model, **each)


def test_greedy_takes_the_best_id(tiny_model, serve, ask, context):
    """Temperature 0 is the argmax, with probability 1."""
    result = serve(tiny_model, lambda engine: engine.generate(ask(temperature=0.0)))

    ids = np.concatenate([context, result.token_ids])
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    logits = model(torch.tensor(ids[None])).logits[0, len(context) - 1 : -1]
    assert result.token_ids.tolist() == logits.argmax(-1).tolist()
    assert result.logprobs.tolist() == [0.0] * 16


def test_greedy_breaks_ties_the_same_way(tmp_path, save_model, serve, ask, together):
    """If all ids tie, greedy always takes the same one, still with probability 1."""
    model = transformers.AutoModelForCausalLM.from_pretrained(save_model(tmp_path))
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(tmp_path)

    results = serve(tmp_path, lambda engine: together(engine, [ask(str(i), temperature=0.0) for i in range(3)]))

    assert len({tuple(result.token_ids.tolist()) for result in results}) == 1
    assert results[0].logprobs.tolist() == [0.0] * 16


def test_many_requests_share_steps(tiny_model, serve, ask, together, decoder):
    """64 requests of 8 tokens take about as many steps as one."""

    async def scenario(engine):
        steps, model = [], engine._backend.model
        forward = model.forward
        model.forward = lambda **kwargs: steps.append(1) or forward(**kwargs)
        await together(engine, [ask(str(i), max_tokens=8) for i in range(64)])
        return engine._backend.decoder.num_steps if decoder == "fused" else len(steps)

    assert serve(tiny_model, scenario, num_blocks=512) < 40


def test_max_context_bounds_context_and_output(tiny_model, serve, ask, context):
    """A context that leaves space for three tokens gets three; one that leaves none is refused."""

    async def scenario(engine):
        result = await engine.generate(ask("fits", np.resize(context, 253), max_tokens=100))
        for length in (256, 257, 5000):
            with pytest.raises(EngineError, match=f"a context of {length} tokens: max_context is 256"):
                await engine.generate(ask("too long", np.resize(context, length)))
        return result

    result = serve(tiny_model, scenario)

    assert (len(result.token_ids), result.finish_reason) == (3, FinishReason.LENGTH)


def test_without_max_tokens_the_context_is_the_limit(tiny_model, serve, ask, context):
    """`max_tokens` None samples until `max_context`."""
    result = serve(tiny_model, lambda engine: engine.generate(ask(max_tokens=None)), max_context=50)

    assert len(result.token_ids) == 50 - len(context)


def test_max_context_is_known_before_start(tiny_model):
    """It is the least of the option, the model's limit and the cache."""
    sizes = [{}, {"max_context": 100}, {"num_blocks": 5, "page_size": 8}]

    engines = [TransformersEngine(TransformersConfig(model=tiny_model, **each), Resources()) for each in sizes]

    assert [engine.capabilities.max_context for engine in engines] == [512, 100, 40]
    assert {engine.capabilities.vocab_size for engine in engines} == {VOCAB_SIZE}


def test_requests_share_a_small_cache(tiny_model, serve, ask, context, together, assert_logprobs):
    """With a cache of one context, requests wait for each other and none is lost."""
    results = serve(
        tiny_model,
        lambda engine: together(engine, [ask(str(i), max_tokens=500) for i in range(3)]),
        max_context=64,
        num_blocks=4,
    )

    assert [len(result.token_ids) for result in results] == [64 - len(context)] * 3
    for result in results:
        assert_logprobs(result, tiny_model)


@pytest.mark.parametrize("wrong", [[1, 512], [-1, 2]])
def test_ids_outside_the_vocabulary_are_refused(tiny_model, serve, ask, wrong):
    """They would crash the manager's thread."""

    async def scenario(engine):
        with pytest.raises(EngineError, match="ids outside the vocabulary of 512"):
            await engine.generate(ask("wrong", np.array(wrong, np.int32)))
        return await engine.generate(ask())

    assert len(serve(tiny_model, scenario).token_ids) == 16


def test_top_k_beyond_the_vocabulary_keeps_all(tiny_model, serve, ask):
    """Unchanged, it would crash the manager's thread."""
    result = serve(tiny_model, lambda engine: engine.generate(ask(top_k=100_000, top_p=0.99)))

    assert len(result.token_ids) == 16


def test_tiny_temperatures_are_greedy():
    """Logits scaled by 1e-38 would overflow to NaN and crash the manager's thread."""
    tiny, zero = SamplingParams(temperature=1e-38), SamplingParams(temperature=0.0)

    assert request_options(tiny, 512) == request_options(zero, 512)


def test_a_duplicate_in_flight_is_refused(tiny_model, serve, ask):
    """The second request with an id raises and the first continues; later the id is free again."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            first = group.create_task(engine.generate(ask()))
            await asyncio.sleep(0)  # the first was sent, and its result needs another pass of the loop
            with pytest.raises(EngineError, match="request 'a' is in flight already"):
                await engine.generate(ask())
        return first.result(), await engine.generate(ask())

    assert [len(result.token_ids) for result in serve(tiny_model, scenario)] == [16, 16]


def test_stop_strings_are_refused(tiny_model, serve, ask):
    """The engine has no tokenizer."""
    with pytest.raises(EngineError, match="no stop strings"):
        serve(tiny_model, lambda engine: engine.generate(ask(stop=("x",))))


def test_an_aborted_id_can_be_used_at_once(tiny_model, serve, ask, in_flight, assert_logprobs, left_over):
    """A late cancel does not hit the next request with the same id, and no handler stays."""

    async def aborted(engine):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.generate(ask(max_tokens=200)))
            await in_flight(engine)
            await engine.abort("a")
        return task.result()

    async def scenario(engine):
        results = []
        for _ in range(5):
            results += [await aborted(engine), await engine.generate(ask(max_tokens=3))]
        return results, left_over(engine)

    results, handlers = serve(tiny_model, scenario)

    assert [result.finish_reason for result in results] == [FinishReason.ABORT, FinishReason.LENGTH] * 5
    assert all(len(result.token_ids) >= 5 for result in results[::2])
    assert handlers == {}
    for result in results:
        assert_logprobs(result, tiny_model)


def test_a_seed_repeats_a_run(tiny_model, serve, ask):
    """With a seed, the same requests in the same order give the same ids on a new engine."""

    async def scenario(engine):
        return [(await engine.generate(ask(str(i)))).token_ids.tolist() for i in range(3)]

    first, second, other = (serve(tiny_model, scenario, seed=seed) for seed in (1, 1, 2))

    assert first == second
    assert first != other


def test_stats_add_up(tiny_model, serve, ask, together):
    """Totals count requests, sampled tokens and cached tokens."""

    async def scenario(engine):
        await together(engine, [ask(str(i), max_tokens=4) for i in range(3)])
        await engine.generate(ask(max_tokens=4))
        return engine.stats()

    stats = serve(tiny_model, scenario)

    assert (stats["num_running"], stats["num_requests"], stats["num_sampled_tokens"]) == (0, 4, 16)
    assert stats["num_cached_tokens"] >= 32
