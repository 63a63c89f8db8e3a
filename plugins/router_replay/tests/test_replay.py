"""The trainer's passes under given routes: padded, packed and shared prefixes, and updates of a policy."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turnwise import Capabilities, ModelSpec
from turnwise.errors import ConfigError, TrajectoryError
from turnwise_grpo_trainer.learner.log_probs import token_log_probs
from turnwise_grpo_trainer.learner.micro_batches import collate
from turnwise_grpo_trainer.learner.prefix_forests import collate_forest, sort_rows
from turnwise_grpo_trainer.learner.replaying import PolicyReplays
from turnwise_grpo_trainer.objective.replays import Replay
from turnwise_grpo_trainer.objective.rows import TokenRows
from turnwise_router_replay.replay import RouterReplay


def make_rows(batch, replays):
    """Return rows with all response tokens in the loss and their routes."""
    return replays.add_columns(TokenRows.from_batch(batch, batch.loss_mask), batch)


def gradients(model, rows, micros, replays):
    """Return (N,) log-probabilities by token, and the gradients of their weighted sum."""
    model.zero_grad()
    found = torch.zeros(rows.num_tokens, dtype=torch.float64)
    for micro in micros:
        with replays.running(micro):
            log_probs, _ = token_log_probs(model, micro, 1.0)
            (log_probs * (1 + micro.tokens % 5)).sum().backward()
        found[micro.tokens] = log_probs.detach().double()
    return found, {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def hard_wired(model, rows, routes):
    """Compute each row alone with routers that look its experts up, written without the library."""
    model.zero_grad()
    found = torch.zeros(rows.num_tokens, dtype=torch.float64)
    for start, stop in zip(rows.bounds, rows.bounds[1:], strict=False):
        for number, layer in enumerate(model.model.layers):
            if number:
                layer.mlp.gate.forward = look_up(layer.mlp.gate, routes[start:stop, number].long())
        logits = model(input_ids=rows["input_ids"][None, start:stop], use_cache=False).logits[0].float()
        each = logits.log_softmax(-1)[:-1].gather(-1, rows["input_ids"][start + 1 : stop, None])[:, 0]
        tokens = torch.arange(start + 1, stop)
        chosen = rows["loss_mask"][tokens] == 1
        (each * (1 + tokens % 5))[chosen].sum().backward()
        found[tokens[chosen]] = each.detach().double()[chosen]
    for layer in model.model.layers[1:]:
        del layer.mlp.gate.forward
    return found, {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def look_up(gate, experts):
    """Return a router that runs the given experts, or its own for tokens without any."""

    def forward(hidden):
        logits = torch.nn.functional.linear(hidden, gate.weight)
        scores = logits.float().softmax(-1)
        own = torch.where((experts >= 0).all(-1, keepdim=True), experts, scores.topk(2).indices)
        weights = scores.gather(1, own)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), own

    return forward


@pytest.fixture
def replays(double, spec):
    """The replay, prepared with the model in float64."""
    return PolicyReplays.prepare((RouterReplay(),), double, spec)


@pytest.mark.parametrize("layout", ["padded", "packed", "forest"])
def test_gradients_equal_hard_wired_routers(double, replays, make_record, make_batch, layout):
    """Rows of different lengths, two of which share a prompt and its routes, and two only the prompt."""
    prompt, rng = np.arange(6), np.random.default_rng(5)
    records = [make_record(rng, prompt, np.random.default_rng(seed), size) for seed, size in ((1, 4), (1, 3), (2, 6))]
    records.append(make_record(rng, prompt[:3], rng, 2))
    rows, metrics = make_rows(make_batch(records), replays)
    routes = rows["replay/routed_experts"]
    micros = (
        [collate_forest(rows, range(4))]
        if layout == "forest"
        else [collate(rows, group, packed=layout == "packed") for group in ((0, 1, 2), (3,))]
    )
    found, expected = gradients(double, rows, micros, replays), hard_wired(double, rows, routes)
    torch.testing.assert_close(found[0], expected[0], atol=1e-6, rtol=0)  # log-probabilities are float32
    assert set(found[1]) == set(expected[1])
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, atol=2e-5, rtol=0)
    # All but the last token of each row.
    assert metrics == {"replay/routed_experts": pytest.approx((rows.num_tokens - 4) / rows.num_tokens)}
    unlike = gradients(double, rows, micros, PolicyReplays())
    assert (unlike[0] - found[0]).abs().max() > 0.1


@settings(max_examples=25, deadline=None, suppress_health_check=[*HealthCheck])
@given(st.integers(0, 99), st.lists(st.booleans(), min_size=2, max_size=6), st.integers(1, 5))
def test_prefixes_with_other_routes_are_not_shared(replays, make_record, make_batch, seed, alike, length):
    """A token is shared only with rows that have its route; with equal routes the whole prompt is."""
    rng, prompt = np.random.default_rng(seed), np.arange(length)
    records = [make_record(rng, prompt, np.random.default_rng(99 if same else seed)) for same in alike]
    rows, _ = make_rows(make_batch(records), replays)
    routes = rows["replay/routed_experts"]
    found = sort_rows(rows, range(len(rows)))
    for one, other, shared in zip(found.order, found.order[1:], found.shared[1:], strict=False):
        first, second = (slice(rows.bounds[row], rows.bounds[row] + shared) for row in (one, other))
        assert torch.equal(routes[first], routes[second])
        assert shared >= (length if alike[one] == alike[other] else 0)
    # Without replay only the ids count.
    batch = make_batch(records)
    plain = sort_rows(TokenRows.from_batch(batch, batch.loss_mask), range(len(rows)))
    assert sum(plain.shared) >= length * (len(rows) - 1) >= 0


def test_values_that_do_not_fit(replays, make_record, make_batch, spec, shape):
    """A batch without the column, an expert too many, and the routes of another model are refused."""
    from turnwise import Trajectory

    record = make_record(np.random.default_rng(0), np.arange(3), np.random.default_rng(0))
    bare = Trajectory([1, 2])
    bare.add_action([3], [-0.5])
    with pytest.raises(ConfigError, match="the column 'routed_experts', which is replayed, is in no record of the bat"):
        make_rows(make_batch([bare]), replays)
    batch = make_batch([record, bare])
    rows, metrics = make_rows(batch, replays)  # a record without routes has those of the policy
    assert (rows["replay/routed_experts"][rows.bounds[1] :] == -1).all()
    assert 0 < metrics["replay/routed_experts"] < 1
    batch.fields["routed_experts"][0, -3, 1, 0] = 6
    with pytest.raises(TrajectoryError, match="column 'routed_experts' has the expert 6 of 6"):
        make_rows(batch, replays)
    part = RouterReplay()
    part.prepare(double_of(spec), spec)
    with pytest.raises(TrajectoryError, match=r"has values of shape \(2, 2\), and the model has 3 layers and 2 expert"):
        part.read(torch.zeros(4, 2, 2, dtype=torch.int16))


def double_of(spec):
    """Return the model of a spec."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(spec.path)


def test_configs_that_do_not_fit(tmp_path):
    """A dense model and an engine without routes are refused in one line."""
    part = RouterReplay()
    assert isinstance(part, Replay)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^train\.replays: router_replay needs a mixture of experts, and the config"):
        part.check(ModelSpec(path=tmp_path))
    with pytest.raises(ConfigError, match=r"'vllm' does not return them; set engine\.enable_return_routed_experts: tr"):
        part.check_engine(Capabilities(), "vllm")
    part.check_engine(Capabilities(columns={"routed_experts"}), "vllm")
