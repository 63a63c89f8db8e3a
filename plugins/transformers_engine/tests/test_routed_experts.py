"""Routes of a mixture of experts: those of a forward pass, of cached tokens, aborted turns and weight updates too."""

import asyncio

import numpy as np
import pytest
import torch
import transformers
from attrs import evolve

from turnwise.errors import ConfigError
from turnwise.record.trajectory import Trajectory
from turnwise.types import FinishReason
from turnwise_moe_routes.recording import record_routes
from turnwise_moe_routes.shapes import COLUMN, find_shape, read_shape
from turnwise_testing.engines.scenarios import CONTEXT, VOCAB_SIZE
from turnwise_testing.references.dense import visibility
from turnwise_testing.references.reference_model import save_random_model

KINDS = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 16, "mlp_only_layers": [0], "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 6},
}


@pytest.fixture(scope="session", params=KINDS)
def mixture(request, tmp_path_factory):
    """The directory of a mixture of three layers, whose routers prefer other experts for other tokens."""
    config = transformers.CONFIG_MAPPING[request.param](
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        num_experts_per_tok=2,
        **KINDS[request.param],
    )
    return save_random_model(config, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def decoder():
    """A mixture is not fused."""
    return "auto"


@pytest.fixture
def serve_routes(serve, mixture):
    """A function that runs a scenario on an engine that returns the routes of the mixture."""

    def run(scenario, **options):
        return serve(mixture, scenario, enable_return_routed_experts=True, **options)

    return run


@pytest.fixture
def expected_routes(mixture):
    """A function that returns (n, layers, top_k) routes of ids by a plain forward pass."""
    model, shape = load(mixture), read_shape(mixture)
    return lambda token_ids, model=model, **layout: record_routes(model, token_ids, shape, **layout)


def load(directory):
    """Load a model in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def sets_of(routes):
    """Return routes with the experts of a token and layer in order: two may change places by rounding."""
    return np.sort(routes, -1)


def assert_routes(result, expected, num_context=37):
    """All tokens but the last sampled one have the expected routes, which has run in no forward pass."""
    routes = result.columns[COLUMN]
    assert routes.dtype == np.int16
    assert len(routes) == num_context + len(result.token_ids)
    np.testing.assert_array_equal(sets_of(routes[:-1]), sets_of(expected[: len(routes) - 1]))
    assert (routes[-1] == -1).all()


def test_routes_of_a_forward_pass(serve_routes, expected_routes, ask, together):
    """Of requests of different lengths in one batch, with chunks of prompts and greedy or sampled tokens."""
    contexts = [CONTEXT, CONTEXT[:5], CONTEXT[3:30], tuple(range(1, 120))]
    requests = [ask(str(number), context, temperature=number % 2) for number, context in enumerate(contexts)]
    results = serve_routes(lambda engine: together(engine, requests), max_batch_tokens=32)
    for context, result in zip(contexts, results, strict=True):
        assert_routes(result, expected_routes([*context, *result.token_ids]), len(context))


def test_cached_tokens(serve_routes, expected_routes, ask, together):
    """Tokens whose pages another request has computed have routes: in a group, and in later turns of an episode."""

    async def scenario(engine):
        group = await together(engine, [ask(str(number), seed=number) for number in range(3)])
        turn = [*CONTEXT, *group[0].token_ids, 5, 6, 7]
        later = await engine.generate(ask("later", turn))
        return group, turn, later

    group, turn, later = serve_routes(scenario)
    assert max(each.num_cached_tokens for each in group) == 32
    assert later.num_cached_tokens >= 48
    for result in group:
        assert_routes(result, expected_routes([*CONTEXT, *result.token_ids]))
    assert_routes(later, expected_routes([*turn, *later.token_ids]), len(turn))
    # A record of both turns has the routes of all tokens but the last.
    spec = find_shape({"num_hidden_layers": 3, "num_experts_per_tok": 2, "num_experts": 8}).column
    record = Trajectory(CONTEXT)
    record.add_action(group[0].token_ids, group[0].logprobs, columns=[(spec, group[0].columns[COLUMN])])
    record.add_observation([5, 6, 7])
    record.add_action(later.token_ids, later.logprobs, columns=[(spec, later.columns[COLUMN])])
    assert not spec.is_fill(record.column(COLUMN)[:-1]).any()


def test_an_update_in_the_middle(serve_routes, expected_routes, ask, in_flight, mixture):
    """A token keeps the routes that its successor was sampled with: of old weights before the update, then of new."""
    changed = load(mixture)
    with torch.no_grad():
        for name, weight in changed.named_parameters():
            if "gate.weight" in name:
                weight.copy_(weight.flip(0))
    weights = [(name, weight.detach().numpy()) for name, weight in changed.named_parameters()]

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.generate(ask("a", max_tokens=120, temperature=1.0)))
            await in_flight(engine)
            await engine.update_weights(weights, 1)
        return task.result(), await engine.generate(ask("b"))

    first, second = serve_routes(scenario)
    versions = np.broadcast_to(first.weight_version, (120,))
    (new,) = np.flatnonzero(np.diff(versions)) + 1
    ids, last_old = [*CONTEXT, *first.token_ids], len(CONTEXT) + new - 1
    before, after = expected_routes(ids), expected_routes(ids, changed)
    routes = sets_of(first.columns[COLUMN])
    np.testing.assert_array_equal(routes[:last_old], sets_of(before)[:last_old])
    np.testing.assert_array_equal(routes[last_old:-1], sets_of(after)[last_old:-1])
    assert (sets_of(before) != sets_of(after)).any()
    assert_routes(second, expected_routes([*CONTEXT, *second.token_ids], changed))  # no page of the old weights


def test_an_aborted_turn(serve_routes, expected_routes, ask, in_flight):
    """Its tokens have routes, and the rest of the turn gives that of its last one."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.generate(ask("a", max_tokens=180)))
            await in_flight(engine)
            await engine.abort("a")
        part = task.result()
        return part, await engine.generate(ask("b", [*CONTEXT, *part.token_ids], max_tokens=4))

    part, rest = serve_routes(scenario)
    assert part.finish_reason is FinishReason.ABORT
    expected = expected_routes([*CONTEXT, *part.token_ids, *rest.token_ids])
    # A token may have run whose successor was not delivered.
    routes, known = part.columns[COLUMN], len(CONTEXT) + len(part.token_ids) - 1
    np.testing.assert_array_equal(sets_of(routes[:known]), sets_of(expected[:known]))
    assert_routes(rest, expected, len(CONTEXT) + len(part.token_ids))


def test_requests_with_layouts(serve_routes, expected_routes, ask, mixture):
    """Parallel paths and a join have the routes of a forward pass under their layout, cached tokens included."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        mixture, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    spec = read_shape(mixture).column

    async def scenario(engine):
        record = Trajectory(CONTEXT)
        paths = record.fork(2)
        for number, path in enumerate([*paths, record]):
            if path is record:
                record.join(paths)
            path.add_forced([number + 1])
            request = evolve(ask(str(number), path.input_ids, max_tokens=6), layout=path.layout)
            result = await engine.generate(request)
            columns = [(spec, result.columns[COLUMN])]
            path.add_action(result.token_ids, result.logprobs, columns=columns)
        return record

    record = serve_routes(scenario)
    visible = torch.from_numpy(visibility(record))[None, None]
    mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)
    positions = torch.from_numpy(record.position_ids.astype(np.int64))[None]
    expected = expected_routes(record.input_ids, model, attention_mask=mask, position_ids=positions)
    routes = record.column(COLUMN)
    np.testing.assert_array_equal(sets_of(routes[:-1]), sets_of(expected[:-1]))
    assert (routes[-1] == -1).all()


def test_models_without_experts(serve, tiny_model):
    """They are refused when the engine starts, in one line; without the option results have no columns."""

    async def scenario(_engine):
        raise AssertionError("the engine started")

    with pytest.raises(ConfigError, match=r"^engine\.enable_return_routed_experts: '.*' is no mixture of experts: its"):
        serve(tiny_model, scenario, enable_return_routed_experts=True)


def test_capabilities(serve, serve_routes, mixture, ask):
    """The engine says whether its results have the column."""

    async def scenario(engine):
        return engine.capabilities.columns, (await engine.generate(ask(max_tokens=2))).columns

    assert serve(mixture, scenario) == (frozenset(), None)
    columns, values = serve_routes(scenario)
    assert columns == {COLUMN} == set(values)
