"""Segment attention equals dense attention with a mask, forward and backward, for any layout, and in a whole model."""

import copy

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import turnwise_segment_attention as segments
from turnwise.record.trajectory import Trajectory
from turnwise_segment_attention import kernels
from turnwise_testing.inputs.strategies import trajectories
from turnwise_testing.references.dense import dense_attention, predecessors, token_logprobs, visibility
from turnwise_testing.references.float64 import float64_throughout


def columns(trajectory):
    """Return block_start and path_start of a record as (1, T) tensors."""
    return [torch.tensor(getattr(trajectory, name))[None] for name in ("block_start", "path_start")]


def record(*blocks, prompt=3, tail=4):
    """Return a record with blocks of paths of the given lengths, and two tokens after each block."""
    trajectory = Trajectory(np.arange(prompt))
    for lengths in blocks:
        paths = trajectory.fork(len(lengths))
        for path, length in zip(paths, lengths, strict=True):
            path.add_action(np.arange(length), np.zeros(length))
        trajectory.join(paths)
        trajectory.add_forced([7, 8])
    trajectory.add_action(np.arange(tail), np.zeros(tail))
    return trajectory


def heads(size, *, num_rows=1, query_heads=4, key_heads=2, dtype=torch.float64):
    """Return query, key and value with gradients."""
    torch.manual_seed(size)
    shapes = [(num_rows, h, size, 8) for h in (query_heads, key_heads, key_heads)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def gradients(output, inputs):
    """Return the gradients of the inputs for a fixed gradient of the output."""
    torch.manual_seed(1)
    return torch.autograd.grad(output, inputs, torch.randn_like(output))


def assert_same(trajectory, tolerance, dtype=torch.float64):
    """Compare output and gradients with the dense reference."""
    inputs = heads(len(trajectory), dtype=dtype)
    seen = torch.from_numpy(visibility(trajectory))[None]
    expected = dense_attention(*inputs, seen, 8**-0.5)
    actual = segments.segment_attention(*inputs, segments.plan(*columns(trajectory)))

    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)
    for mine, theirs in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=0)


@settings(deadline=None, max_examples=60)
@given(trajectories().filter(len))
def test_equals_dense_attention(trajectory):
    """Any number of blocks and paths, with blocks at the start and empty paths, agrees to 1e-12 in float64."""
    assert_same(trajectory, 1e-12)


@pytest.mark.parametrize("num_paths", range(1, 9))
def test_gradients_in_float32(num_paths):
    """Two blocks of one to eight paths agree to 1e-5 in float32, for gradients of size 1."""
    lengths = [5 * i % 17 + 1 for i in range(num_paths)]
    assert_same(record(lengths, lengths[::-1]), 1e-5, torch.float32)


@settings(deadline=None, max_examples=25)
@given(trajectories().filter(len))
def test_plain_torch_equals_the_fused_kernels(trajectory):
    """The kernels for devices without fused ones agree too, with chunks smaller than the runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_CHUNK", 4)
        patch.setattr(kernels, "forward", kernels.chunked_forward)
        patch.setattr(kernels, "backward", kernels.chunked_backward)
        assert_same(trajectory, 1e-12)


def test_gradcheck():
    """The backward pass agrees with finite differences."""
    trajectory = record((3, 2))
    plan = segments.plan(*columns(trajectory))
    inputs = heads(len(trajectory), query_heads=2, key_heads=1)

    assert torch.autograd.gradcheck(lambda q, k, v: segments.segment_attention(q, k, v, plan), inputs)


@settings(deadline=None, max_examples=25)
@given(st.lists(trajectories().filter(len), min_size=1, max_size=3), st.booleans())
def test_padded_rows(rows, left):
    """Each row of a batch, padded on either side, has the output of the row alone; padding has 0."""
    width = max(map(len, rows))
    blocks, paths, mask = (torch.zeros(len(rows), width, dtype=torch.int32) for _ in range(3))
    spans = [slice(width - len(row), width) if left else slice(0, len(row)) for row in rows]
    for index, (row, span) in enumerate(zip(rows, spans, strict=True)):
        inside = torch.tensor(row.path_start > 0)
        for target, column in ((blocks, row.block_start), (paths, row.path_start)):
            target[index, span] = torch.where(inside, torch.tensor(column) + span.start, 0)
        mask[index, span] = 1
    inputs = heads(width, num_rows=len(rows))
    actual = segments.segment_attention(*inputs, segments.plan(blocks, paths, mask))

    assert not actual[mask[:, None].expand(-1, 4, -1) == 0].any()
    for index, (row, span) in enumerate(zip(rows, spans, strict=True)):
        own = [each[index : index + 1, :, span] for each in inputs]
        expected = dense_attention(*own, torch.from_numpy(visibility(row))[None], 8**-0.5)
        torch.testing.assert_close(actual[index : index + 1, :, span], expected, atol=1e-12, rtol=0)


@settings(deadline=None, max_examples=40)
@given(trajectories().filter(len))
def test_mask_mod_is_the_rule(trajectory):
    """The rule for FlexAttention equals the visibility of the record for every pair of tokens."""
    size = len(trajectory)
    rule = segments.mask_mod(*columns(trajectory))
    query, key = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    zero = torch.zeros_like(query)

    assert torch.equal(torch.from_numpy(visibility(trajectory)), rule(zero, zero, query, key))


@pytest.mark.filterwarnings("ignore:.*without torch.compile")  # torch warns once a process
def test_flex_attention_forward():
    """The forward pass of FlexAttention with the rule equals the dense reference, on a CPU too."""
    from torch.nn.attention.flex_attention import flex_attention

    trajectory = record((20, 30, 10), (40, 5))
    query, key, value = (each.detach().float() for each in heads(len(trajectory)))
    mask = segments.block_mask(*columns(trajectory))
    actual = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)

    expected = dense_attention(query, key, value, torch.from_numpy(visibility(trajectory))[None], 8**-0.5)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that an operator returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


@pytest.mark.parametrize("padded", [False, True])
def test_block_masks_are_those_of_torch_without_a_whole_mask(padded):
    """Two rows of 2,560 columns, one with padding: the same blocks, from parts of the mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    size = 2500
    rows = [record((700, 300, 129), (128, 400), prompt=300, tail=10), record((1, 2), prompt=1000)]
    both = [columns(each) for each in rows]
    blocks, paths = (
        torch.cat([torch.nn.functional.pad(each[index], (0, size - each[index].shape[1])) for each in both])
        for index in (0, 1)
    )
    real = (torch.arange(size) < torch.tensor([[len(each)] for each in rows])).long() if padded else None
    with LargestTensor() as seen:
        mask = segments.block_mask(blocks, paths, real)

    rule = segments.mask_mod(blocks, paths, real)
    expected = create_block_mask(rule, len(rows), None, size, size, device="cpu")
    assert seen.largest <= 2 * 1024 * (size + 128)
    assert torch.equal(mask.to_dense(), expected.to_dense())
    assert mask.seq_lengths == expected.seq_lengths
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(expected, name)), name
    for name in ("kv_indices", "full_kv_indices"):
        assert torch.equal(getattr(mask, name), getattr(expected, name)), name


@pytest.fixture(scope="module", params=[transformers.Qwen3Config, transformers.LlamaConfig])
def models(request):
    """A tiny model with sdpa, and the same with segment attention."""
    segments.register()
    config = request.param(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    dense, mine = (
        transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float64, attn_implementation=name
        )
        for name in ("sdpa", segments.NAME)
    )
    mine.load_state_dict(dense.state_dict())
    return dense, mine


def test_a_whole_model(models):
    """A model has the dense model's log-probabilities under a layout, and finite gradients."""
    dense, mine = models
    trajectory = record((5, 3, 8), (2, 6))
    blocks, paths = columns(trajectory)
    before = segments.predecessors(blocks, paths)[0]
    ids = torch.tensor(trajectory.input_ids.astype(np.int64))
    with float64_throughout():
        logits = mine(
            input_ids=ids[None],
            position_ids=torch.tensor(trajectory.position_ids.astype(np.int64))[None],
            layout=segments.plan(blocks, paths),
            use_cache=False,
        ).logits[0]
        expected = token_logprobs(dense, trajectory)
    logprobs = logits[before[1:]].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]

    assert predecessors(trajectory).tolist() == before.tolist()
    np.testing.assert_allclose(logprobs.detach(), expected[1:], atol=1e-12, rtol=0)
    logprobs.sum().backward()
    assert all(torch.isfinite(weight.grad).all() for weight in mine.parameters())


def test_a_call_without_a_plan_is_refused(models):
    """Plain attention over a record with paths would be wrong, so the call raises."""
    with pytest.raises(ValueError, match="needs a plan: call the model with the keyword argument 'layout'"):
        models[1](input_ids=torch.arange(4)[None], use_cache=False)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((torch.zeros(1, 4), torch.zeros(1, 3)), "shapes differ"),
        ((torch.zeros(1, 4), torch.zeros(1, 4), torch.tensor([[1, 0, 1, 1]])), "padding between"),
        ((torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 1])), "columns 2:4 have path_start=1 and block_start=1"),
    ],
)
def test_bad_layouts_are_refused(arguments, text):
    """Different shapes, padding between real tokens, and ints that are no layout are refused."""
    with pytest.raises(ValueError, match=text):
        segments.plan(*arguments)


def test_a_plan_of_another_batch_is_refused():
    """The error names the rows and columns of the plan and of the tensors."""
    inputs = heads(5)
    with pytest.raises(ValueError, match="the plan has 1 rows and 4 columns, but the queries have 1 rows and 5"):
        segments.segment_attention(*inputs, segments.plan(torch.zeros(4), torch.zeros(4)))
