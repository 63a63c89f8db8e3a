"""Grammars around the fake vLLM: what the engine checks itself, and what it asks vLLM for."""

import asyncio
import importlib.metadata
import threading

import pytest
from attrs import evolve

import turnwise_calculator_demo
from turnwise.errors import ConfigError, EngineError
from turnwise.types import FinishReason, Grammar
from turnwise_engine_support.grammars import GrammarCompiler
from turnwise_vllm_engine import VllmConfig
from turnwise_vllm_engine.launch import _settings, check_grammars, engine_arguments

MODEL = turnwise_calculator_demo.model_dir()
END = 2


def ask_for(ask, text, request_id="a", **sampling):
    """Return a request with a grammar."""
    return evolve(ask(request_id, **{"stop_token_ids": (END,), **sampling}), grammar=Grammar(text=text))


def serve_grammars(serve, scenario):
    """Run a scenario on an engine whose model has a tokenizer."""
    return serve(scenario, model=MODEL, grammars=True)


def test_a_turn_that_leaves_its_grammar_is_an_error(serve, ask):
    """The fake samples any ids: a turn with wrong log-probabilities never comes out."""

    async def scenario(engine):
        with pytest.raises(EngineError, match="the grammar does not allow the token"):
            await engine.generate(ask_for(ask, 'start: "a"', max_tokens=3))
        await engine.generate(ask("free", max_tokens=3))
        return engine.capabilities.grammars, dict(engine.stats())

    has_grammars, stats = serve_grammars(serve, scenario)
    assert has_grammars
    assert 0 == stats["num_running"]


def test_a_wrong_grammar_does_not_reach_vllm(serve, ask, llm):
    """Its processor would end vLLM."""

    async def scenario(engine):
        with pytest.raises(EngineError, match="cannot be compiled"):
            await engine.generate(ask_for(ask, "start: nothing"))

    serve_grammars(serve, scenario)
    assert not llm.requests


@pytest.mark.parametrize("end", ["abort", "stop"])
def test_a_request_ends_while_its_grammar_is_compiled(serve, ask, llm, monkeypatch, end):
    """It returns no ids and never reaches vLLM; after a stop it is an error."""
    compiling, go_on = threading.Event(), threading.Event()
    start = GrammarCompiler.start

    def wait(self, request):
        compiling.set()
        go_on.wait()
        return start(self, request)

    monkeypatch.setattr(GrammarCompiler, "start", wait)

    async def scenario(engine):
        task = asyncio.ensure_future(engine.generate(ask_for(ask, 'start: "a"')))
        await asyncio.to_thread(compiling.wait)
        if end == "abort":
            await engine.abort("a")
            go_on.set()
            return await task
        ending = asyncio.ensure_future(engine.stop())
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(EngineError, match="was stopped"):
            await task
        await ending
        return None

    result = serve_grammars(serve, scenario)
    if result is not None:
        assert (0, FinishReason.ABORT) == (len(result.token_ids), result.finish_reason)
    assert not llm.requests


def test_grammars_are_masked_by_our_processor():
    """In front of the user's own, with the runner that has this interface; without the option nothing changes."""
    config = VllmConfig(grammars=True, engine_args={"logits_processors": ["mine:Mine"]})
    found = engine_arguments(config, "cuda", 4096, stop_strings=False)

    ours = "turnwise_vllm_engine.grammar_processor:GrammarProcessor"
    assert [ours, "mine:Mine"] == found["logits_processors"]
    assert "0" == _settings(config, "cuda")["VLLM_USE_V2_MODEL_RUNNER"]
    assert "logits_processors" not in engine_arguments(VllmConfig(), "cuda", 4096, stop_strings=False)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in _settings(VllmConfig(), "cuda")


def test_grammars_that_cannot_work_are_refused(tmp_path, monkeypatch):
    """No tokenizer, drafts that are not masked, a package that is too old or missing; off, nothing is checked."""
    with pytest.raises(ConfigError, match=r"engine\.grammars: there is no tokenizer\.json"):
        check_grammars(VllmConfig(grammars=True), tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.grammars excludes engine_args\.speculative_config"):
        check_grammars(VllmConfig(grammars=True, engine_args={"speculative_config": {"method": "ngram"}}), MODEL)
    monkeypatch.setattr("turnwise_engine_support.diagnosis.version", lambda _name: "1.7.6")
    with pytest.raises(ConfigError, match=r"llguidance 1\.9 or later is not installed, found 1\.7\.6"):
        check_grammars(VllmConfig(grammars=True), MODEL)

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("turnwise_engine_support.diagnosis.version", missing)
    with pytest.raises(ConfigError, match=r"llguidance 1\.9 or later is not installed$"):
        check_grammars(VllmConfig(grammars=True), MODEL)
    check_grammars(VllmConfig(), tmp_path)
