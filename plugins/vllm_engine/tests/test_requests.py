"""Requests in vLLM's terms, and vLLM's outputs as results."""

from types import SimpleNamespace

import numpy as np
import pytest
from attrs import evolve

from turnwise.errors import EngineError
from turnwise.types import FinishReason, Grammar
from turnwise_vllm_engine.requests import check_request, parse_result, sampling_options

LIMITS = {"max_context": 64, "vocab_size": 512, "stop_strings": False, "grammars": False}


def output(ids, reason="length", stop_reason=None, spans=None, cached=0):
    completion = SimpleNamespace(
        token_ids=ids,
        logprobs=SimpleNamespace(logprobs=[-0.5] * len(ids)),
        finish_reason=reason,
        stop_reason=stop_reason,
        weight_versions=[SimpleNamespace(version="0", start=0, end=len(ids))] if spans is None else spans,
    )
    return SimpleNamespace(outputs=[completion], num_cached_tokens=cached)


@pytest.mark.parametrize(
    ("ids", "sampling", "message"),
    [
        ([], {}, "request 'a' has an empty context"),
        ([1] * 64, {}, "request 'a' has a context of 64 tokens: max_context is 64, output included"),
        ([1, 512], {}, "request 'a' has ids outside the vocabulary of 512"),
        ([1], {"stop": ("x",)}, "the vllm engine has no tokenizer, which stop strings need: use stop_token_ids"),
    ],
)
def test_requests_that_crash_vllm_are_refused(ask, ids, sampling, message):
    """The error says in one line what is wrong with the request."""
    with pytest.raises(EngineError, match=message):
        check_request(ask(token_ids=np.array(ids, np.int32), **sampling), **LIMITS)


def test_the_output_fits_the_context(ask):
    """`max_tokens`, but never more than the space after the context."""
    assert [5, 60] == [check_request(ask(token_ids=[1, 2, 3, 4], max_tokens=n), **LIMITS) for n in (5, 61)]


@pytest.mark.parametrize(
    ("grammars", "sampling", "message"),
    [
        (False, {}, "the vllm engine has no grammars: set its option grammars"),
        (True, {}, "a request with a grammar needs stop_token_ids"),
        (True, {"stop_token_ids": (2,), "extra": {"min_tokens": 3}}, "a request with a grammar cannot have min_tokens"),
    ],
)
def test_grammars_that_cannot_be_kept_are_refused(ask, grammars, sampling, message):
    """The option is off, the turn could not end, or vLLM would exclude the ids that end it."""
    request = evolve(ask(**sampling), grammar=Grammar(text='start: "a"'))

    with pytest.raises(EngineError, match=message):
        check_request(request, **LIMITS | {"grammars": grammars})


def test_a_grammar_reaches_the_processor(ask):
    """With the ids that end the turn, and how many ids of the context it has begun with."""
    request = evolve(ask(stop_token_ids=(2,)), grammar=Grammar(text='start: "a"', num_read=1))

    expected = {"turnwise_grammar": {"text": 'start: "a"', "num_read": 1, "stops": [2]}}
    assert expected == sampling_options(request, 8)["extra_args"]
    assert "extra_args" not in sampling_options(ask(), 8)


def test_only_the_requests_own_stop_ids_end_it(ask):
    """vLLM must ignore the model's end-of-turn ids, or it would remove them from the output."""
    options = sampling_options(ask(stop_token_ids=(2,), stop=("END",), seed=3), 8)

    assert (True, [2], ["END"], 3) == tuple(options[name] for name in ("ignore_eos", "stop_token_ids", "stop", "seed"))
    assert (True, False) == (options["detokenize"], options["skip_special_tokens"])


@pytest.mark.parametrize(("temperature", "expected"), [(0.0, 0.0), (1e-6, 0.0), (1e-5, 1e-5), (0.7, 0.7)])
def test_greedy_has_vllms_limit(ask, temperature, expected):
    """Temperatures that vLLM treats as 0 are sent as 0."""
    assert expected == sampling_options(ask(temperature=temperature), 8)["temperature"]


def test_greedy_logprobs_are_zero(ask):
    """The greedy distribution has one id; vLLM reports the log-probability among all ids."""
    drawn = parse_result(ask(), output([1, 2]), version=0)
    greedy = parse_result(ask(temperature=0.0), output([1, 2]), version=0)

    assert ([-0.5, -0.5], [0.0, 0.0]) == (drawn.logprobs.tolist(), greedy.logprobs.tolist())


@pytest.mark.parametrize(
    ("reason", "stop_reason", "expected"),
    [
        ("stop", 59, (FinishReason.STOP, 59)),
        ("stop", "END", (FinishReason.STOP, "END")),
        ("length", None, (FinishReason.LENGTH, None)),
        ("abort", None, (FinishReason.ABORT, None)),
        ("abort", 7, (FinishReason.ABORT, None)),
    ],
)
def test_finish_reasons(ask, reason, stop_reason, expected):
    """vLLM's reasons have our names, and only `stop` has a stop reason."""
    result = parse_result(ask(), output([1], reason, stop_reason), version=0)

    assert expected == (result.finish_reason, result.stop_reason)


@pytest.mark.parametrize("reason", ["error", "repetition", None])
def test_an_unknown_reason_is_an_error(ask, reason):
    """A result that ended for an unknown reason is not used."""
    with pytest.raises(EngineError, match=f"vLLM ended request 'a' with {reason!r}"):
        parse_result(ask(), output([1], reason), version=0)


def test_cached_tokens_are_of_the_context(ask):
    """vLLM also counts cached output of a request that an update sent back to the queue."""
    assert [37, 5, 0] == [
        parse_result(ask(), output([1], cached=each), version=0).num_cached_tokens for each in (60, 5, None)
    ]


def test_versions_are_read_from_vllms_spans(ask):
    """vLLM's versions are texts; a result without tokens has the current version."""
    spans = [SimpleNamespace(version="3", start=0, end=1), SimpleNamespace(version="4", start=1, end=3)]

    assert [3, 4, 4] == parse_result(ask(), output([1, 2, 3], spans=spans), version=4).weight_version.tolist()
    assert 7 == parse_result(ask(), output([], "abort", spans=[]), version=7).weight_version


def test_a_version_is_not_guessed(ask):
    """An earlier version than the current one may have sampled the tokens."""
    with pytest.raises(EngineError, match="the weight versions of 0 tokens are known, but 2 were sampled"):
        parse_result(ask(), output([1, 2], spans=[]), version=4)
