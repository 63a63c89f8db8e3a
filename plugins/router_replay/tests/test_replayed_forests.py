"""Forests under replayed routes are separate rows under these routes: all gradients within 1e-9, in float64."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turnwise import Trajectory
from turnwise_grpo_trainer.config import LoraConfig
from turnwise_grpo_trainer.learner.log_probs import token_log_probs
from turnwise_grpo_trainer.learner.lora import add_adapters
from turnwise_grpo_trainer.learner.micro_batches import collate
from turnwise_grpo_trainer.learner.prefix_forests import collate_forest
from turnwise_grpo_trainer.learner.replaying import PolicyReplays
from turnwise_grpo_trainer.objective.rows import TokenRows
from turnwise_router_replay.replay import RouterReplay
from turnwise_testing.references.float64 import float64_throughout

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""The adapted modules: a mixture's fused experts cannot be."""
KINDS = ("new", "sample", "other_routes", "branch", "paths")


@pytest.fixture
def in_float64():
    """Compute in float64 what transformers and the trainer compute in float32: norms, routers, softmax and logits."""
    with float64_throughout():
        yield


@pytest.fixture(params=[False, True], ids=["all_weights", "lora"])
def policy(request, double, spec):
    """The mixture in float64, perhaps with adapters that change it, and its replay."""
    if request.param:
        torch.manual_seed(1)
        double = add_adapters(double, LoraConfig(rank=2, target_modules=ATTENTION), "").double()
        for name, parameter in double.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    return double.train(), PolicyReplays.prepare((RouterReplay(),), double, spec)


def answer(rng, target, draw_routes, column, context=None):
    """Add a turn with routes of its tokens; with those of all tokens before it, if they are given."""
    size = int(rng.integers(1, 5))
    routes = draw_routes(rng, size)
    if context is not None:
        routes = np.concatenate([context, routes])
    target.add_action(rng.integers(0, 2, size), -rng.random(size).astype(np.float32), columns=[(column, routes)])


def make_records(seed, kinds, draw_routes, column):
    """Return records that share prompts, turns and routes, or only some of them, with earlier ones."""
    rng = np.random.default_rng(seed)
    records, prompt = [], rng.integers(0, 40, int(rng.integers(1, 6)))
    routes = draw_routes(rng, len(prompt))
    for kind in kinds:
        if kind == "new" or not records:
            records.append(Trajectory(rng.integers(0, 40, 3)))
            answer(rng, records[-1], draw_routes, column, draw_routes(rng, 3))
        elif kind == "branch":
            earlier = records[int(rng.integers(len(records)))]
            records.append(earlier.branched(earlier.mark()))
            answer(rng, records[-1], draw_routes, column)
        else:
            own = routes.copy()
            if kind == "other_routes":
                own[int(rng.integers(len(own)))] = draw_routes(rng, 1)[0]
            records.append(Trajectory(prompt))
            answer(rng, records[-1], draw_routes, column, own)
        if kind == "paths":
            paths = records[-1].fork(2)
            for path in paths:
                answer(rng, path, draw_routes, column)
            records[-1].join(paths)
            answer(rng, records[-1], draw_routes, column)
    return records


def compute(model, micros, rows, replays):
    """Return log-probabilities, and the gradient of a loss with its own weight for each token."""
    model.zero_grad()
    values = torch.zeros(rows.num_tokens, dtype=torch.float64)
    weights = torch.linspace(-1, 1, rows.num_tokens, dtype=torch.float64)
    for micro in micros:
        with replays.running(micro):
            log_probs, _ = token_log_probs(model, micro, 0.7)
            (weights[micro.tokens] * log_probs.double().exp()).sum().backward()
        values[micro.tokens] = log_probs.detach().double()
    gradients = [each.grad for each in model.parameters() if each.requires_grad and each.grad is not None]
    return values, torch.cat([each.flatten() for each in gradients])


@settings(max_examples=12, deadline=None, suppress_health_check=[*HealthCheck])
@given(seed=st.integers(0, 999), kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=6))
def test_a_forest_with_routes_equals_its_rows(policy, in_float64, shape, draw_routes, make_batch, seed, kinds):
    """Samples, branches and paths of one prompt, whose routes are equal or differ; with adapters and without."""
    model, replays = policy
    batch = make_batch(make_records(seed, kinds, draw_routes, shape.column))
    rows, _ = replays.add_columns(TokenRows.from_batch(batch, batch.loss_mask), batch)
    forest = collate_forest(rows, range(len(rows)))

    separate = [collate(rows, [row], packed=False) for row in range(len(rows))]
    expected = compute(model, separate, rows, replays)
    actual = compute(model, [forest], rows, replays)

    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
    assert expected[1].abs().max() > 1e-6
    prompts = sum(kind in {"sample", "paths"} for kind in kinds[1:])  # the first record shares none
    assert rows.num_tokens - forest.input_ids.numel() >= max(prompts - 1, 0)
