"""Routed experts of vLLM: arguments, refusals, results, and the real vLLM where its build collects them."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest

from turnwise.errors import ConfigError, EngineError
from turnwise.protocols import ModelSpec, Resources
from turnwise_moe_routes.shapes import RouteShape
from turnwise_testing.engines.scenarios import VOCAB_SIZE, run_scenario, simple_request
from turnwise_vllm_engine import VllmConfig, VllmEngine
from turnwise_vllm_engine.launch import _settings, check_routes, engine_arguments, installed_build
from turnwise_vllm_engine.requests import parse_result

SHAPE = RouteShape(num_layers=2, top_k=1, num_experts=4)


@pytest.fixture
def mixture(tmp_path):
    """A directory whose config.json is that of a mixture of experts."""
    sizes = {"num_hidden_layers": 2, "num_experts_per_tok": 1, "num_experts": 4, "vocab_size": VOCAB_SIZE}
    (tmp_path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    return tmp_path


def completion(ids, routed_experts):
    """Return vLLM's last output of a request."""
    return SimpleNamespace(
        outputs=[
            SimpleNamespace(
                token_ids=ids,
                logprobs=SimpleNamespace(logprobs=[-0.5] * len(ids)),
                finish_reason="length",
                stop_reason=None,
                weight_versions=[SimpleNamespace(version="0", start=0, end=len(ids))],
                routed_experts=routed_experts,
            )
        ],
        num_cached_tokens=0,
    )


def test_arguments():
    """The option is vLLM's, and chooses the model runner that has it; without it nothing is passed."""
    config = VllmConfig(enable_return_routed_experts=True)
    assert engine_arguments(config, "cuda", 64, stop_strings=False)["enable_return_routed_experts"] is True
    assert _settings(config, "cuda")["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "enable_return_routed_experts" not in engine_arguments(VllmConfig(), "cuda", 64, stop_strings=False)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in _settings(VllmConfig(), "cuda")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"grammars": True}, "excludes engine.grammars: vLLM has each in another of its two model runners"),
        ({"prefix_caching": False}, "needs engine.prefix_caching: vLLM keeps the experts by its pages"),
    ],
)
def test_options_that_exclude_it(mixture, options, text):
    """They are refused before vLLM is imported."""
    with pytest.raises(ConfigError, match=rf"^engine\.enable_return_routed_experts {text}$"):
        check_routes(VllmConfig(enable_return_routed_experts=True, **options), mixture, "cuda")


def test_a_dense_model(mixture):
    """It has no experts; without the option any model is fine."""
    check_routes(VllmConfig(enable_return_routed_experts=True), mixture, "cuda")
    (mixture / "config.json").write_text("{}", encoding="utf-8")
    check_routes(VllmConfig(), mixture, "cuda")
    with pytest.raises(ConfigError, match=r"is no mixture of experts: its config\.json has no experts"):
        check_routes(VllmConfig(enable_return_routed_experts=True), mixture, "cuda")


def test_a_cpu(mixture):
    """vLLM 0.32 would end with "Model Runner V2 requires Triton", which its build for a CPU has not."""
    with pytest.raises(
        ConfigError, match=r"^engine\.enable_return_routed_experts needs a GPU: in vLLM's build for a C"
    ):
        check_routes(VllmConfig(enable_return_routed_experts=True), mixture, "cpu")


def test_results():
    """vLLM's experts of context and output become the column; those of an aborted request may be missing."""
    request, given = simple_request(token_ids=[1, 2]), np.array([[[0], [3]], [[1], [1]], [[2], [0]]], np.uint8)
    result = parse_result(request, completion([5, 6], given), version=0, routes=SHAPE)
    assert result.columns["routed_experts"][:, :, 0].tolist() == [[0, 3], [1, 1], [2, 0], [-1, -1]]
    result = parse_result(request, completion([5], None), version=0, routes=SHAPE)
    assert (result.columns["routed_experts"] == -1).all()
    assert parse_result(request, completion([5], None), version=0).columns is None
    with pytest.raises(EngineError, match="vLLM returned routed experts of shape"):
        parse_result(request, completion([], given), version=0, routes=SHAPE)


def test_capabilities(mixture):
    """The engine says before its start that its results have the column."""
    resources = Resources(model=ModelSpec(path=mixture))
    for enabled in (False, True):
        engine = VllmEngine(VllmConfig(enable_return_routed_experts=enabled), resources, device="cpu")
        assert engine.capabilities.columns == ({"routed_experts"} if enabled else set())


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_real_vllm(tmp_path):
    """Its experts are those of a forward pass; its build for a CPU is refused."""
    import torch
    import transformers

    from turnwise_moe_routes.recording import record_routes
    from turnwise_moe_routes.shapes import read_shape
    from turnwise_testing.references.reference_model import mixture_config, save_random_model

    config = mixture_config(VOCAB_SIZE, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    path = save_random_model(config, tmp_path)
    engine = VllmEngine(
        VllmConfig(model=path, max_context=512, kv_cache_bytes=64 << 20, enable_return_routed_experts=True),
        Resources(),
    )
    if installed_build()[1] == "cpu":
        with pytest.raises(ConfigError, match="needs a GPU"):
            asyncio.run(engine.start())
        return
    result = run_scenario(engine, lambda running: running.generate(simple_request()), 300)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    routes = record_routes(model, [*simple_request().token_ids, *result.token_ids], read_shape(path))
    equal = np.sort(result.columns["routed_experts"][:-1]) == np.sort(routes[:-1])
    assert equal.mean() > 0.9  # a GPU rounds otherwise
