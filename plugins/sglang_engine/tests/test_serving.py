"""Requests through the engine to a fake SGLang that behaves like the real one."""

import asyncio

import numpy as np
import pytest
from attrs import evolve

from turnwise.errors import EngineError
from turnwise.types import FinishReason

pytestmark = pytest.mark.usefixtures("starts_a_process")

VOCAB_SIZE = 512
EOS = 9


def greedy_ids(context, num_tokens):
    """Return the best ids of the fake model."""
    ids = list(context)
    for _ in range(num_tokens):
        ids.append((sum(ids) * 7 + len(ids)) % VOCAB_SIZE)
    return ids[len(context) :]


def context_before_eos():
    """Return a context that the fake model continues with an end-of-turn id as the second token."""
    for first in range(VOCAB_SIZE):
        for second in range(VOCAB_SIZE):
            if greedy_ids([first, second], 2)[1] == EOS:
                return [first, second]
    raise AssertionError("no such context")


def test_the_models_end_of_turn_ends_only_turns_that_ask_for_it(serve, ask):
    """SGLang stops at it, as `ignore_eos` would disable the request's stop ids too; the turn continues after it."""
    context = context_before_eos()
    expected = greedy_ids(context, 6)

    async def scenario(engine):
        requests = [ask(token_ids=context, max_tokens=6, stop_token_ids=ids) for ids in ((), (expected[5],), (EOS,))]
        return [await engine.generate(each) for each in requests]

    free, other, asked = serve(scenario)

    assert (expected, FinishReason.LENGTH, None) == (free.token_ids.tolist(), free.finish_reason, free.stop_reason)
    stop = expected[: expected.index(expected[5]) + 1]
    assert (stop, FinishReason.STOP, expected[5]) == (other.token_ids.tolist(), other.finish_reason, other.stop_reason)
    assert (expected[:2], FinishReason.STOP, EOS) == (asked.token_ids.tolist(), asked.finish_reason, asked.stop_reason)


def test_a_turn_may_end_with_an_unnamed_end_of_turn(serve, ask):
    """No tokens remain to be sampled after it, so the reason is `length`."""
    context = context_before_eos()
    request = ask(token_ids=context, max_tokens=2, stop_token_ids=(VOCAB_SIZE - 1,))

    result = serve(lambda engine: engine.generate(request))

    assert (2, FinishReason.LENGTH, None) == (len(result.token_ids), result.finish_reason, result.stop_reason)


def test_logprobs_of_each_sampling_method(serve, ask):
    """Greedy ones are 0; filtered ones are of the distribution that the filters leave."""

    async def scenario(engine):
        methods = [
            {"temperature": 0.0},
            {"temperature": 1.0},
            {"temperature": 1.0, "top_p": 0.9},
            {"temperature": 1.0, "top_k": 5},
            {"temperature": 1.0, "top_k": 10_000},
        ]
        return [(await engine.generate(ask(max_tokens=3, **method))).logprobs.tolist() for method in methods]

    greedy, plain, top_p, top_k, all_ids = serve(scenario)

    assert [0.0] * 3 == greedy
    assert [-0.5] * 3 == plain == all_ids
    assert [-0.25] * 3 == top_p == top_k


def test_an_early_abort_is_not_lost(serve, ask):
    """SGLang drops an abort that reaches its scheduler before the request."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.generate(ask(max_tokens=200)))
            await asyncio.sleep(0)
            await engine.abort("a")
        return task.result()

    result = serve(scenario)

    assert result.finish_reason is FinishReason.ABORT
    assert len(result.token_ids) < 20


def test_ids_with_a_common_prefix_are_aborted_separately(serve, ask):
    """SGLang aborts by prefix, so the engine gives it unrelated ids."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.generate(ask(each, max_tokens=100))) for each in ("x-1", "x-10")]
            await asyncio.sleep(0.05)
            await engine.abort("x-1")
        return [task.result().finish_reason for task in tasks]

    assert [FinishReason.ABORT, FinishReason.LENGTH] == serve(scenario)


def test_the_context_may_have_the_promised_length(serve, ask):
    """SGLang refuses inputs and truncates outputs near its limit, which is longer than ours."""

    async def scenario(engine):
        longest = engine.capabilities.max_context
        almost = ask(token_ids=np.ones(longest - 1, np.int32), max_tokens=50)
        whole = ask(token_ids=np.ones(10, np.int32), max_tokens=longest)
        return longest, [len((await engine.generate(each)).token_ids) for each in (almost, whole)]

    longest, lengths = serve(scenario, max_context=40)

    assert (40, [1, 30]) == (longest, lengths)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [512]}, "request 'a' has ids outside the vocabulary of 512"),
        ({"token_ids": []}, "request 'a' has an empty context"),
        ({"stop": ("x",)}, "the sglang engine has no tokenizer, which stop strings need: set its option stop_strings"),
    ],
)
def test_requests_that_crash_sglang_are_refused(serve, ask, change, message):
    """The engine refuses them before SGLang sees them."""

    async def scenario(engine):
        with pytest.raises(EngineError, match=message):
            await engine.generate(ask(**change))
        return engine.stats()["num_running"]

    assert serve(scenario) == 0


def test_an_id_in_flight_is_refused(serve, ask):
    """`abort` could not tell the two requests apart."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.generate(ask()))
            await asyncio.sleep(0)
            with pytest.raises(EngineError, match="request 'a' is in flight already"):
                await engine.generate(ask())

    serve(scenario)


def test_prefix_hits_are_counted(serve, ask):
    """In the result and in the totals; none if the cache is off."""

    async def scenario(engine):
        results = [await engine.generate(ask()) for _ in range(2)]
        return [each.num_cached_tokens for each in results], engine.stats()["num_cached_tokens"]

    assert ([0, 36], 36) == serve(scenario)
    assert ([0, 0], 0) == serve(scenario, prefix_caching=False)


def test_seeds_need_deterministic_inference(serve, ask):
    """With that option seeds are passed on, and the capability is true."""

    async def scenario(engine):
        request = ask(temperature=1.0, seed=3)
        results = [(await engine.generate(request)).token_ids.tolist() for _ in range(2)]
        return engine.capabilities.seeds, results[0] == results[1]

    assert (False, False) == serve(scenario)
    assert (True, True) == serve(scenario, engine_args={"enable_deterministic_inference": True})


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
def test_a_listener_hears_ids_before_the_end(serve, ask, sampling):
    """With each method of sampling; the turn, which never ends by itself, is aborted when it was heard."""

    async def scenario(engine):
        heard, has_heard = [], asyncio.Event()

        def listen(token_ids):
            heard.extend(token_ids)
            if len(heard) >= 3:
                has_heard.set()

        request = evolve(ask(max_tokens=400, **sampling), on_tokens=listen)
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            task = group.create_task(engine.generate(request))
            await has_heard.wait()
            assert not task.done()
            await engine.abort(request.request_id)
        return heard, task.result()

    heard, result = serve(scenario)

    assert len(heard) >= 3
    assert heard == result.token_ids.tolist()[: len(heard)]


def test_a_listener_hears_on_behind_an_unnamed_end_of_turn(serve, ask):
    """Each id once, although SGLang gets a second request."""
    context, heard = context_before_eos(), []
    expected = greedy_ids(context, 6)
    request = evolve(ask(token_ids=context, max_tokens=6, stop_token_ids=(VOCAB_SIZE - 1,)), on_tokens=heard.extend)

    result = serve(lambda engine: engine.generate(request))

    assert expected == result.token_ids.tolist()
    assert 3 < len(heard)
    assert expected[: len(heard)] == heard
