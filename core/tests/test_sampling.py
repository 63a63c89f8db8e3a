"""Options of an engine among the sampling parameters."""

import pickle

import pytest

from turnwise.errors import ConfigError
from turnwise.types import Capabilities, SamplingParams


def test_parameters_with_options_are_values():
    """They are equal, hashed, copied and pickled like others."""
    first = SamplingParams(extra={"min_p": 0.1, "logit_bias": {"5": 1.0}})
    second = SamplingParams(extra={"logit_bias": {"5": 1.0}, "min_p": 0.1})

    assert first == second == pickle.loads(pickle.dumps(first)) == first.with_()
    assert hash(first) == hash(second)
    assert first != SamplingParams(extra={"min_p": 0.2}) != SamplingParams()
    assert first.with_(seed=3).extra == first.extra


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        pytest.param({"temperature": 0.5}, "'extra.temperature' must be set as temperature, beside extra", id="ours"),
        pytest.param({"extra": {}}, "'extra.extra' must be set as extra", id="itself"),
        pytest.param({"n": 2}, "'extra.n' must not be set: the record of a turn depends on it", id="n"),
        pytest.param({"logprobs": 5}, "'extra.logprobs' must not be set", id="logprobs"),
        pytest.param({"min_p": float("nan")}, "'extra.min_p' must be a JSON value: nan", id="nan"),
        pytest.param({"min_p": {1}}, "'extra.min_p' must be a JSON value", id="set"),
    ],
)
def test_some_options_are_refused(extra, text):
    """Options with a key here, or on which a record depends, and values that no file can hold."""
    with pytest.raises(ValueError, match=text):
        SamplingParams(extra=extra)


@pytest.mark.parametrize(
    ("known", "text"),
    [
        pytest.param((), "sampling.extra.min_p: the engine does not know this option; it knows none", id="none"),
        pytest.param(("b", "a"), "sampling.extra.min_p: the engine does not know this option; it knows a, b", id="two"),
    ],
)
def test_an_engine_refuses_an_unknown_option_by_name(known, text):
    """The error names the option and the ones that the engine knows."""
    with pytest.raises(ConfigError) as caught:
        Capabilities(sampling_options=frozenset(known)).check_extra(SamplingParams(extra={"min_p": 0.1}))

    assert str(caught.value) == text
    Capabilities(sampling_options=frozenset({"min_p"})).check_extra(SamplingParams(extra={"min_p": 0.1}))
