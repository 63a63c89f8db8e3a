"""Rows that share prefixes are attended to in one line, as in separate rows; the rule is one for all kernels."""

import copy

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import turnwise_segment_attention as segments
from turnwise.record.trajectory import Trajectory
from turnwise_segment_attention import kernels
from turnwise_testing.inputs.strategies import trajectories
from turnwise_testing.references.dense import dense_attention, visibility
from turnwise_testing.references.forests import merge_records


@st.composite
def forests(draw):
    """Draw up to six records: each continues the beginning of an earlier one, or is new, or is an earlier one."""
    records = [draw(trajectories(max_steps=5).filter(len))]
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["new", "branch", "cut", "same", "longer"]))
        earlier = draw(st.sampled_from(records))
        if kind == "new":
            records.append(draw(trajectories(max_steps=4).filter(len)))
        elif kind == "same":
            records.append(earlier)
        elif kind == "longer":  # it shares whole blocks
            record = earlier.branched(earlier.mark())
            record.add_forced(draw(st.lists(st.integers(0, 3), min_size=1, max_size=6)))
            records.append(record)
        else:
            record = cut(earlier, draw(st.integers(1, len(earlier))))
            if kind == "branch":
                record.add_forced(draw(st.lists(st.integers(0, 3), min_size=1, max_size=6)))
            records.append(record)
    return records


def cut(record, length):
    """Return the first tokens of a record without its blocks."""
    return Trajectory(record.input_ids[:length])


def tensors(forest):
    """Return the ints of a forest, each (1, L)."""
    return {
        name: torch.from_numpy(getattr(forest, name))[None] for name in ("block_start", "path_start", "subtree_end")
    }


def heads(size):
    """Return query, key and value of four and two heads, with gradients, in float64."""
    torch.manual_seed(size)
    return [torch.randn(1, count, size, 8, dtype=torch.float64, requires_grad=True) for count in (4, 2, 2)]


def assert_same(records):
    """Compare output and gradients with those of the rows, each by itself."""
    forest = merge_records(records)
    inputs = heads(len(forest.subtree_end))
    actual = segments.segment_attention(*inputs, segments.plan(**tensors(forest)))
    pieces, expected = [], []
    for record, place in zip(records, forest.places, strict=True):
        own = [each[:, :, place] for each in inputs]
        expected.append(dense_attention(*own, torch.from_numpy(visibility(record))[None], 8**-0.5))
        pieces.append(actual[:, :, place])
    mine, theirs = torch.cat(pieces, 2), torch.cat(expected, 2)
    weight = torch.randn_like(theirs)

    torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)
    grads = [torch.autograd.grad(each, inputs, weight) for each in (mine, theirs)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=0)


@settings(deadline=None, max_examples=80)
@given(forests())
def test_a_forest_equals_its_rows(records):
    """Any forest, with blocks and paths in its rows: output and gradients are those of separate rows."""
    assert_same(records)


@settings(deadline=None, max_examples=25)
@given(forests())
def test_plain_torch_equals_the_rows_too(records):
    """The kernels of other devices agree, with chunks that are smaller than the runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_CHUNK", 4)
        patch.setattr(kernels, "forward", kernels.chunked_forward)
        patch.setattr(kernels, "backward", kernels.chunked_backward)
        assert_same(records)


@settings(deadline=None, max_examples=80)
@given(forests())
def test_the_rule_is_the_visibility_of_the_rows(records):
    """FlexAttention's rule sees what the rows see, for every pair; the plan has as many pairs."""
    forest = merge_records(records)
    size = len(forest.subtree_end)
    query, key = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    zero = torch.zeros_like(query)
    ints = tensors(forest)
    seen = segments.mask_mod(**ints)(zero, zero, query, key)

    assert torch.equal(torch.from_numpy(forest.visible), seen)
    assert int(forest.visible.sum()) == segments.plan(**ints).num_pairs


@settings(deadline=None, max_examples=40)
@given(trajectories().filter(len))
def test_a_row_alone_is_a_forest(record):
    """Today's rule is the case of one row: the plan covers the same pairs as the plan without subtrees."""
    blocks, paths = (torch.tensor(getattr(record, name))[None] for name in ("block_start", "path_start"))
    ends = torch.full_like(blocks, len(record))

    assert segments.plan(blocks, paths).num_pairs == segments.plan(blocks, paths, subtree_end=ends).num_pairs


def test_a_group_needs_one_part_for_its_prompt():
    """Eight answers of one prompt: each attends to itself, and all together to the prompt."""
    records = []
    for answer in range(8):
        record = Trajectory(np.arange(40))
        record.add_forced([100 + answer, *range(9)])
        records.append(record)
    plan = segments.plan(**tensors(merge_records(records)))

    assert (9, 1) == (len(plan.runs), len(plan.prefixes))
    assert (slice(40, 120), slice(0, 40)) == (plan.prefixes[0].queries, plan.prefixes[0].keys)


@pytest.mark.filterwarnings("ignore:.*without torch.compile")  # torch warns once a process
def test_flex_attention_forward():
    """The block mask of a forest has the rule: the forward pass of FlexAttention equals separate rows."""
    from torch.nn.attention.flex_attention import flex_attention

    records = []
    for answer in range(3):
        record = Trajectory(np.arange(130))
        record.add_forced([200 + answer, *range(90)])
        records.append(record)
    forest = merge_records(records)
    query, key, value = (each.detach().float() for each in heads(len(forest.subtree_end)))
    mask = segments.block_mask(**tensors(forest))
    actual = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)

    expected = dense_attention(query, key, value, torch.from_numpy(forest.visible)[None], 8**-0.5)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ([4, 3, 3, 3], "columns 1:4 have subtree_end=3"),
        ([4, 5, 4, 4], "columns 1:2 have subtree_end=5"),
        ([2, 4, 4, 4], "columns 1:4 have subtree_end=4"),
        ([4, 4, 4], "shapes differ"),
    ],
)
def test_subtrees_that_are_no_forest_are_refused(ends, text):
    """A subtree contains its token and ends within those around it."""
    zeros = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=text):
        segments.plan(zeros, zeros, subtree_end=torch.tensor(ends))


def test_a_model_may_get_a_plan_in_some_calls_only():
    """Without a plan, the optional attention is `sdpa` to the bit, packed rows too; with one, it needs no mask."""
    segments.register()
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa")
    optional = copy.deepcopy(plain)
    optional.set_attn_implementation(segments.OPTIONAL_NAME)
    ids = torch.arange(12)[None]
    packed = torch.cat([torch.arange(5), torch.arange(7)])[None]
    for options in ({}, {"position_ids": packed}, {"attention_mask": torch.ones(1, 1, 12, 12).tril().bool()}):
        calls = [model(input_ids=ids, use_cache=False, **options).logits for model in (plain, optional)]
        assert torch.equal(*calls)

    zeros = torch.zeros_like(ids)
    plan = segments.plan(zeros, zeros, subtree_end=torch.tensor([[5] * 5 + [12] * 7]))
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    logits = optional(input_ids=ids, position_ids=packed, layout=plan, attention_mask=mask, use_cache=False).logits
    expected = plain(input_ids=ids, position_ids=packed, use_cache=False).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
