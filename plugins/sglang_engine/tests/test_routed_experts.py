"""Routed experts of SGLang: refusals, results of a fake, and the real SGLang."""

import asyncio
import base64
import json
from types import SimpleNamespace

import numpy as np
import pytest
from attrs import define, evolve, field

from turnwise.errors import ConfigError, EngineError
from turnwise.protocols import ModelSpec, Resources
from turnwise.types import FinishReason
from turnwise_moe_routes.shapes import COLUMN, RouteShape
from turnwise_sglang_engine import SglangConfig, SglangEngine
from turnwise_sglang_engine.arguments import server_arguments
from turnwise_sglang_engine.frames import Frame
from turnwise_sglang_engine.requests import FILTERED, GREEDY, PLAIN, parse_result
from turnwise_sglang_engine.service import Service
from turnwise_testing.engines.scenarios import VOCAB_SIZE, run_scenario, simple_request

EOS = 9
SIZES = {"num_hidden_layers": 2, "num_experts_per_tok": 1, "num_experts": 4}


@pytest.fixture
def mixture(tmp_path, small_model):
    """The directory of the fake's model, whose config.json is that of a mixture of experts."""
    for path in small_model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | SIZES), encoding="utf-8")
    return tmp_path


def expected(context, ids):
    """Return the experts of the fake for all tokens but the last."""
    known = np.array([*context, *ids][:-1])
    return np.stack([known % 4, (known + 1) % 4], -1)


@pytest.mark.usefixtures("starts_a_process")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_results(serve, ask, mixture, temperature):
    """A turn that continues after the model's own end of turn has the experts of all of its requests."""

    async def scenario(engine):
        return engine.capabilities.columns, await engine.generate(ask(max_tokens=40, temperature=temperature))

    columns, result = serve(scenario, model=mixture, enable_return_routed_experts=True)
    assert columns == {COLUMN}
    assert len(result.token_ids) == 40
    routes = result.columns[COLUMN]
    assert routes[:-1, :, 0].tolist() == expected(ask().token_ids, result.token_ids).tolist()
    assert (routes[-1] == -1).all()


@pytest.mark.usefixtures("starts_a_process")
def test_without_the_option(serve, ask):
    """Nothing is asked for, and results have no column."""

    async def scenario(engine):
        return engine.capabilities.columns, (await engine.generate(ask())).columns

    assert serve(scenario) == (frozenset(), None)


def test_arguments(mixture, small_model):
    """The option is SGLang's; a dense model and a CPU are refused before SGLang starts."""
    config = SglangConfig(device="cuda", enable_return_routed_experts=True)
    assert server_arguments(config, ModelSpec(path=mixture))["enable_return_routed_experts"] is True
    assert "enable_return_routed_experts" not in server_arguments(SglangConfig(device="cuda"), ModelSpec(path=mixture))
    with pytest.raises(ConfigError, match=r"^engine\.enable_return_routed_experts: .* is no mixture of experts: its"):
        server_arguments(config, ModelSpec(path=small_model))
    with pytest.raises(
        ConfigError, match=r"^engine\.enable_return_routed_experts needs a GPU: SGLang registers the mem"
    ):
        server_arguments(evolve(config, device="cpu"), ModelSpec(path=mixture))


def test_experts_that_do_not_fit():
    """Their number must be a multiple of layers and experts of a token; an aborted request may have none."""
    shape, request = RouteShape(num_layers=2, top_k=1, num_experts=4), simple_request(token_ids=[1, 2])
    head = {"reason": "length", "stop": None, "num_cached_tokens": 0, "spans": [(0, 0, 1)]}

    def parse(routes):
        arrays = [np.array([5], np.int32), np.array([-0.5], np.float32), np.array(routes, np.int32)]
        return parse_result(request, Frame(head, arrays), version=0, routes=shape)

    assert parse([]).columns[COLUMN].tolist() == [[[-1], [-1]]] * 3
    assert parse([1, 2, 3, 0]).columns[COLUMN][:, :, 0].tolist() == [[1, 2], [3, 0], [-1, -1]]
    assert parse([1, 2, 3, 0]).logprobs.tolist() == [-0.5]
    with pytest.raises(EngineError, match="SGLang returned 3 routed experts for 2 times 1"):
        parse([1, 2, 3])
    with pytest.raises(EngineError, match="SGLang returned the expert 4 of 4"):
        parse([1, 4])


@define(eq=False)
class AbortedManager:
    """Ends an aborted request as SGLang does with one in a queue: it may lack the last log-probabilities."""

    ids: list
    num_logprobs: int
    rid_to_state: dict = field(factory=dict)
    aborted: asyncio.Event = field(factory=asyncio.Event)
    asked: asyncio.Event = field(factory=asyncio.Event)

    async def generate_request(self, request, _):
        self.rid_to_state[request.rid] = SimpleNamespace(dispatched=True)
        self.asked.set()
        await self.aborted.wait()
        routes = expected(request.input_ids, self.ids).astype(np.int32)
        logprobs = [-0.5] * self.num_logprobs
        yield {
            "output_ids": list(self.ids),
            "meta_info": {
                "finish_reason": {"type": "abort", "message": "Aborted by AbortReq."},
                "weight_versions": [{"version": "0", "start": 0, "end": len(self.ids)}],
                "output_token_logprobs": [(value, 0, None) for value in logprobs],
                "output_token_sampling_logprobs": logprobs,
                "routed_experts": base64.b64encode(routes.tobytes()).decode(),
            },
        }

    def abort_request(self, rid):
        self.aborted.set()


async def abort_a_turn(manager, method, context):
    """Return the frame of a turn that is aborted while it runs."""
    sent = []
    async with asyncio.TaskGroup() as group:
        service = Service(manager, SimpleNamespace(GenerateReqInput=SimpleNamespace), repr, 1, group)
        service.send = lambda head, *arrays: sent.append(Frame(head, list(arrays)))
        options = {"max_new_tokens": 8, "stop_token_ids": []}
        head = {"op": "generate", "id": 7, "method": method, "options": options, "stream": False, "routes": True}
        service.receive(Frame(head, [np.array(context, np.int32)]))
        await manager.asked.wait()
        service.receive(Frame({"op": "abort", "id": 7}))
    (frame,) = sent
    return frame


@pytest.mark.parametrize("method", [PLAIN, FILTERED, GREEDY])
@pytest.mark.parametrize("num_logprobs", range(5))
@pytest.mark.parametrize("num_ids", range(5))
def test_an_abort_with_fewer_log_probabilities_than_ids(method, num_ids, num_logprobs):
    """The result has the tokens with a log-probability, and the experts of these."""
    if num_logprobs > num_ids:
        return
    context, ids = [5, 6, 7], [3, 1, 4, 2][:num_ids]
    frame = asyncio.run(abort_a_turn(AbortedManager(ids, num_logprobs), method, context))
    shape, request = RouteShape(num_layers=2, top_k=1, num_experts=4), simple_request(token_ids=context)
    result = parse_result(request, frame, version=0, routes=shape)

    kept = ids if method == GREEDY else ids[:num_logprobs]
    assert (kept, FinishReason.ABORT) == (result.token_ids.tolist(), result.finish_reason)
    routes = result.columns[COLUMN][:, :, 0]
    known = expected(context, ids)[: len(context) + len(kept)]
    assert len(routes) == len(context) + len(kept)
    assert known.tolist() == routes[: len(known)].tolist()
    assert (routes[len(known) :] == -1).all()


def test_too_many_experts_without_an_abort():
    """They do not fit, and are refused."""
    shape, request = RouteShape(num_layers=2, top_k=1, num_experts=4), simple_request(token_ids=[1, 2])
    head = {"reason": "length", "stop": None, "num_cached_tokens": 0, "spans": [(0, 0, 1)]}
    arrays = [np.array([5], np.int32), np.array([-0.5], np.float32), np.zeros(8, np.int32)]
    with pytest.raises(EngineError, match="SGLang returned routed experts of shape"):
        parse_result(request, Frame(head, arrays), version=0, routes=shape)


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_the_real_sglang(tmp_path):
    """Its experts are those of a forward pass, of cached tokens too."""
    import torch
    import transformers

    from turnwise_moe_routes.recording import record_routes
    from turnwise_moe_routes.shapes import read_shape
    from turnwise_testing.references.reference_model import mixture_config, save_random_model

    config = mixture_config(VOCAB_SIZE, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    path = save_random_model(config, tmp_path)
    engine = SglangEngine(
        SglangConfig(model=path, max_context=512, num_threads=1, enable_return_routed_experts=True), Resources()
    )

    async def scenario(running):
        first = await running.generate(simple_request())
        longer = simple_request("b", [*simple_request().token_ids, *first.token_ids, 7])
        return [(simple_request(), first), (longer, await running.generate(longer))]

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for request, result in run_scenario(engine, scenario, 600):
        routes = record_routes(model, [*request.token_ids, *result.token_ids], read_shape(path))
        equal = np.sort(result.columns[COLUMN][:-1]) == np.sort(routes[:-1])
        assert equal.mean() > 0.99
