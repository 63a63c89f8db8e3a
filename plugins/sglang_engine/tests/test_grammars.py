"""Grammars without SGLang: arguments, checks, and what a request gives to the backend."""

import json

import pytest
from attrs import evolve

import turnwise_calculator_demo
from turnwise.errors import ConfigError, EngineError
from turnwise.protocols import ModelSpec
from turnwise.types import Grammar
from turnwise_sglang_engine import SglangConfig
from turnwise_sglang_engine.arguments import server_arguments
from turnwise_sglang_engine.requests import check_request
from turnwise_sglang_engine.service import Turn

MODEL = turnwise_calculator_demo.model_dir()
LIMITS = {"max_context": 64, "vocab_size": 512, "stop_strings": False}


def test_grammars_need_our_backend_and_the_tokenizer():
    """SGLang makes no backend without a tokenizer; without the option it gets neither."""
    config, spec = SglangConfig(device="cpu", grammars=True), ModelSpec(path=MODEL)
    found = [server_arguments(each, spec) for each in (config, evolve(config, grammars=False))]

    names = ("grammar_backend", "skip_tokenizer_init")
    assert [("turnwise", False), ("none", True)] == [tuple(each[name] for name in names) for each in found]


def test_grammars_that_cannot_work_are_refused(small_model):
    """A folder without a tokenizer, and drafts, which are not masked."""
    with pytest.raises(ConfigError, match=r"engine\.grammars: there is no tokenizer\.json beside the model"):
        server_arguments(SglangConfig(device="cpu", grammars=True), ModelSpec(path=small_model))
    config = SglangConfig(device="cpu", grammars=True, engine_args={"speculative_algorithm": "EAGLE"})
    with pytest.raises(ConfigError, match=r"engine\.grammars excludes engine_args\.speculative_algorithm"):
        server_arguments(config, ModelSpec(path=MODEL))
    with pytest.raises(ValueError, match="'grammar_backend': the engine sets it"):
        SglangConfig(engine_args={"grammar_backend": "xgrammar"})


@pytest.mark.parametrize(
    ("grammars", "sampling", "message"),
    [
        (False, {}, "the sglang engine has no grammars: set its option grammars"),
        (True, {}, "a request with a grammar needs stop_token_ids"),
        (True, {"stop_token_ids": (2,), "extra": {"min_new_tokens": 3}}, "cannot have min_new_tokens"),
    ],
)
def test_grammars_that_cannot_be_kept_are_refused(ask, grammars, sampling, message):
    """The option is off, the turn could not end, or SGLang would exclude the ids that end it."""
    request = evolve(ask(**sampling), grammar=Grammar(text='start: "a"'))

    with pytest.raises(EngineError, match=message):
        check_request(request, **LIMITS, grammars=grammars)


def test_a_turn_that_goes_on_has_read_its_ids():
    """A request that is sent to SGLang again goes on behind all ids of its turn: those of the context, and its own."""
    options = {"stop_token_ids": [2], "max_new_tokens": 9}
    turn = Turn({"id": 1, "options": options, "grammar": ['start: "abc"', 2]}, context=[5, 6, 7])
    turn.ids += [8]

    assert ['start: "abc"', [2], [6, 7, 8]] == json.loads(turn.options["ebnf"])
    assert "ebnf" not in Turn({"id": 1, "options": options}, context=[5]).options
