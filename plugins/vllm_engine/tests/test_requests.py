"""What a request becomes on its way to vLLM, and an output on its way back."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import EngineError
from turnwise.types import FinishReason, SamplingParams
from turnwise_vllm_engine.requests import num_new_tokens, result_of, sampling_options, versions_of

LIMITS = {"max_context": 64, "vocab_size": 512, "stop_strings": False}


def output(ids, reason="length", stop_reason=None, spans=None, cached=0):
    completion = SimpleNamespace(
        token_ids=ids,
        logprobs=SimpleNamespace(logprobs=[-0.5] * len(ids)),
        finish_reason=reason,
        stop_reason=stop_reason,
        weight_versions=spans,
    )
    return SimpleNamespace(outputs=[completion], num_cached_tokens=cached)


def span(version, start, end):
    return SimpleNamespace(version=str(version), start=start, end=end)


@pytest.mark.parametrize(
    ("ids", "sampling", "message"),
    [
        ([], {}, "request 'a' has an empty context"),
        ([1] * 64, {}, "request 'a' has a context of 64 tokens: max_context is 64, output included"),
        ([1, 512], {}, "request 'a' has ids outside the vocabulary of 512"),
        ([1, -1], {}, "request 'a' has ids outside the vocabulary of 512"),
        ([1], {"stop": ("x",)}, "the vllm engine runs without a tokenizer, so it has no stop strings"),
    ],
)
def test_what_vllm_would_die_of_is_refused(ask, ids, sampling, message):
    """One line that says what is wrong with the request."""
    with pytest.raises(EngineError, match=message):
        num_new_tokens(ask(token_ids=np.array(ids, np.int32), **sampling), **LIMITS)


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, 60), (5, 5), (60, 60), (61, 60)])
def test_the_output_fits_the_context(ask, max_tokens, expected):
    """What is asked for, but never more than the room behind the context."""
    assert expected == num_new_tokens(ask(token_ids=[1, 2, 3, 4], max_tokens=max_tokens), **LIMITS)


def test_only_the_requests_own_stop_ids_end_it():
    """The model's end-of-turn ids are told like any other: vLLM would end by them without a word."""
    options = sampling_options(SamplingParams(stop_token_ids=(2,), stop=("END",), seed=3), 8)

    assert (True, [2], ["END"], 3) == tuple(options[name] for name in ("ignore_eos", "stop_token_ids", "stop", "seed"))
    assert (True, False) == (options["detokenize"], options["skip_special_tokens"])


@pytest.mark.parametrize(("temperature", "expected"), [(0.0, 0.0), (1e-6, 0.0), (1e-5, 1e-5), (0.7, 0.7)])
def test_greedy_begins_where_vllm_says(temperature, expected):
    """A temperature that vLLM takes for 0 is sent as 0."""
    assert expected == sampling_options(SamplingParams(temperature=temperature), 8)["temperature"]


def test_greedy_draws_from_one_id(ask):
    """Its log-probability is 0, whatever vLLM says of it among all ids."""
    drawn = result_of(ask(), output([1, 2]), version=0)
    greedy = result_of(ask(temperature=0.0), output([1, 2]), version=0)

    assert ([-0.5, -0.5], [0.0, 0.0]) == (drawn.logprobs.tolist(), greedy.logprobs.tolist())


def test_a_logprob_that_rounds_above_zero_is_zero(ask):
    """The softmax of a sure token may round to a little over 1."""
    sure = output([1])
    sure.outputs[0].logprobs.logprobs = [1e-9]

    assert [0.0] == result_of(ask(), sure, version=0).logprobs.tolist()


@pytest.mark.parametrize(
    ("reason", "told", "expected"),
    [
        ("stop", 59, (FinishReason.STOP, 59)),
        ("stop", "END", (FinishReason.STOP, "END")),
        ("length", None, (FinishReason.LENGTH, None)),
        ("abort", None, (FinishReason.ABORT, None)),
        ("abort", 7, (FinishReason.ABORT, None)),
    ],
)
def test_reasons(ask, reason, told, expected):
    """vLLM's words are ours, and only a stop has a stop reason."""
    result = result_of(ask(), output([1], reason, told), version=0)

    assert expected == (result.finish_reason, result.stop_reason)


@pytest.mark.parametrize("reason", ["error", "repetition", None])
def test_an_unknown_reason_is_an_error(ask, reason):
    """An answer that ended for a reason of vLLM's own is not taken for a good one."""
    with pytest.raises(EngineError, match=f"vLLM ended request 'a' with {reason!r}"):
        result_of(ask(), output([1], reason), version=0)


def test_cached_tokens_are_those_of_the_context(ask):
    """A request that was read again counts its own output too; the context is all that can be saved."""
    assert [37, 5, 0] == [
        result_of(ask(), output([1], cached=each), version=0).num_cached_tokens for each in (60, 5, None)
    ]


def test_an_answer_without_tokens_has_the_version_of_now(ask):
    """An abort before the first token."""
    assert 7 == result_of(ask(), output([], "abort", spans=[]), version=7).weight_version


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=6))
def test_each_token_has_the_version_of_its_span(parts):
    """Whatever the spans, empty ones included: one version, or one for each token."""
    spans, expected, start = [], [], 0
    for version, length in parts:
        spans.append(span(version, start, start + length))
        expected += [version] * length
        start += length

    versions = versions_of(spans, start, 9)

    assert (expected or [9]) == np.broadcast_to(versions, (start or 1,)).tolist()
    assert isinstance(versions, int) == (len(set(expected)) < 2)
