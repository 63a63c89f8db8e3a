"""A forest has each shared token once; log-probabilities and gradients are those of separate rows, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_batches import VOCABULARY, make_batch, parallel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from turnwise import Trajectory
from turnwise_grpo_trainer.config import LoraConfig
from turnwise_grpo_trainer.learner.log_probs import token_log_probs
from turnwise_grpo_trainer.learner.lora import add_adapters
from turnwise_grpo_trainer.learner.micro_batches import collate
from turnwise_grpo_trainer.learner.prefix_forests import collate_forest, sort_rows
from turnwise_grpo_trainer.objective.rows import TokenRows
from turnwise_testing.references.float64 import float64_throughout
from turnwise_testing.references.forests import merge_records

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@st.composite
def forests(draw):
    """Draw up to six records that share prompts, turns and blocks of paths with each other."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    records = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["new", "sample", "branch", "parallel", "same"]))
        earlier = draw(st.sampled_from(records)) if records else None
        if kind == "parallel":
            records.append(parallel(rng))
            continue
        if earlier is None or kind == "new":
            record = Trajectory(rng.integers(0, VOCABULARY, draw(st.integers(1, 6))))
        elif kind == "sample":
            record = Trajectory(earlier.input_ids[: draw(st.integers(1, len(earlier)))])
        else:
            record = earlier.branched(earlier.mark())
        if kind != "same" or not len(record.response_mask):
            num = draw(st.integers(1, 5))
            # Few ids, so that samples often begin with the same tokens.
            record.add_action(rng.integers(0, 2, num), -rng.random(num))
        records.append(record)
    return records


def make_rows(records):
    """Return rows with all response tokens in the loss."""
    batch = make_batch(records)
    return TokenRows.from_batch(batch, batch.attention_mask[:, batch.prompt_length :])


def load(kind, attention="sdpa"):
    """Return a tiny model in float64, whose attention is far from uniform."""
    torch.manual_seed(0)
    classes = {
        "llama": (LlamaForCausalLM, LlamaConfig, {}),
        "qwen": (Qwen3ForCausalLM, Qwen3Config, {}),
        "moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, MOE),
    }
    model_class, config_class, more = classes[kind.partition("+")[0]]
    if attention.startswith("turnwise_segments"):
        import turnwise_segment_attention

        turnwise_segment_attention.register()
    config = config_class(**SHAPE, **more, attn_implementation=attention)
    config._experts_implementation = "eager"  # the other one has no float64
    model = model_class(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    if kind.endswith("+lora"):
        modules = ("q_proj", "v_proj") if kind.startswith("moe") else LoraConfig().target_modules  # not fused experts
        model = add_adapters(model, LoraConfig(rank=2, target_modules=modules), "").double()
        torch.nn.init.normal_(dict(model.named_parameters())["model.layers.0.self_attn.q_proj.lora_B.default.weight"])
    return model.train()


def compute(model, micros, num_tokens, **options):
    """Return (N,) log-probabilities and entropies, and the gradient of a loss with its own weight for each token."""
    model.zero_grad()
    values = torch.zeros(2, num_tokens, dtype=torch.float64)
    weights = torch.linspace(-1, 1, num_tokens, dtype=torch.float64)
    for micro in micros:
        log_probs, entropy = token_log_probs(model, micro, 0.7, entropy="gradient", **options)
        (weights[micro.tokens] * (log_probs.double().exp() + entropy.double())).sum().backward()
        values[0, micro.tokens], values[1, micro.tokens] = log_probs.detach().double(), entropy.detach().double()
    gradients = [each.grad for each in model.parameters() if each.requires_grad and each.grad is not None]
    return values, torch.cat([each.flatten() for each in gradients])


@pytest.fixture
def in_float64():
    """Compute in float64 what transformers and the trainer compute in float32: norms, routers, softmax and logits."""
    with float64_throughout():
        yield


@pytest.mark.many_cases
@pytest.mark.parametrize("attention", ["sdpa", "eager", "turnwise_segments", "turnwise_segments_or_sdpa"])
@pytest.mark.parametrize("kind", ["llama", "qwen", "qwen+lora", "moe", "moe+lora"])
@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
@given(records=forests(), chunk=st.sampled_from([None, 3]))
def test_gradients_are_those_of_separate_rows(in_float64, kind, attention, records, chunk):
    """Within 1e-9, for log-probabilities, entropies and every weight; with positions and blocks of parallel paths."""
    rows = make_rows(records)
    model = load(kind, attention)
    chosen = [row for row in range(len(rows)) if rows.select([row]).targets.numel()]
    if not chosen:
        return
    separate = [collate(rows, [row], packed=False) for row in chosen]
    forest = collate_forest(rows, chosen)

    expected = compute(model, separate, rows.num_tokens)
    actual = compute(model, [forest], rows.num_tokens, chunk=chunk)

    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
    assert expected[1].abs().max() > 1e-6


@settings(deadline=None)
@given(records=forests())
def test_a_forest_is_that_of_the_reference(records):
    """Exactly as many tokens as a tree of dictionaries has nodes, and every token sees what it sees in its row."""
    rows = make_rows(records)
    micro = collate_forest(rows, range(len(rows)))
    expected = merge_records(records)

    assert expected.visible.shape == micro.attention_mask()[0, 0].shape
    assert int(expected.visible.sum()) == int(micro.attention_mask().sum())
    found = sort_rows(rows, range(len(rows)))
    assert len(expected.subtree_end) == rows.num_tokens - found.num_shared
    assert sorted(rows.targets.tolist()) == sorted(micro.tokens.tolist())
    torch.testing.assert_close(rows["input_ids"][micro.tokens], micro.labels)
    before = micro.input_ids[0, micro.keep[micro.predictors[1]]]
    torch.testing.assert_close(rows["input_ids"][rows.predictors[micro.tokens]], before)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=8))
def test_sorted_rows_share_what_they_have_in_common(contexts):
    """Each row has with the row before it the longest prefix that it has with any earlier row."""
    rows = make_rows([Trajectory(each) for each in contexts])
    found = sort_rows(rows, range(len(rows)))
    ordered = [contexts[row] for row in found.order]

    assert ordered == sorted(contexts)
    for number, (row, shared) in enumerate(zip(ordered, found.shared, strict=True)):
        earlier = ordered[:number]
        assert not earlier or row[:shared] in [other[:shared] for other in earlier]
        assert len(row) == shared or row[: shared + 1] not in [other[: shared + 1] for other in earlier]


def replayed(rows, routes):
    """Return the rows with the experts of the rollout, which the model would replay."""
    return evolve(rows.with_columns(routed_experts=routes), forward_columns=(*rows.forward_columns, "routed_experts"))


def test_tokens_with_other_replayed_routes_are_not_shared():
    """A prompt whose tokens went to other experts in one of the samples is forwarded for it again, from there on."""
    records = []
    for answer in range(3):
        record = Trajectory(range(10))
        record.add_action([20 + answer] * 4, [-1.0] * 4)
        records.append(record)
    rows = make_rows(records)
    routes = torch.zeros(rows.num_tokens, 2, 4, dtype=torch.int64)

    assert 10 + 3 * 4 == collate_forest(replayed(rows, routes), range(3)).input_ids.numel()
    routes[14 + 6, 1, 2] = 3  # the seventh token of the second row
    assert 10 + 3 * 4 + 4 == collate_forest(replayed(rows, routes), range(3)).input_ids.numel()


def test_other_positions_are_not_shared():
    """Equal ids at other positions, and in other paths, are other tokens."""
    rows = make_rows([Trajectory(range(6)), Trajectory(range(6))])
    moved = rows["position_ids"].clone()
    moved[8:] += 1

    micro = collate_forest(rows.with_columns(position_ids=moved), [0, 1])

    assert 2 + 4 + 4 == micro.input_ids.numel()
