"""Segment attention and FlexAttention against dense attention: values, gradients, memory, and up to 32,768 tokens."""

import pytest
import torch
from gpu_support import attention_inputs, layout_columns, report, small
from torch.nn.attention.flex_attention import flex_attention

import turnwise_segment_attention as segments
from turnwise_testing.references.dense import dense_attention

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest error, relative to the largest value; bfloat16 has 8 bits."""


def attend(kind, inputs, columns):
    """Attend with one of the two."""
    if kind == "segment":
        return segments.segment_attention(*inputs, segments.plan(*columns))
    return torch.compile(flex_attention, dynamic=False)(*inputs, block_mask=segments.block_mask(*columns))


def relative_error(actual, expected):
    """Return the largest difference, relative to the largest value."""
    actual, expected = (each.detach().double() for each in (actual, expected))
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", ["segment", "flex"])
@small
def test_values_and_gradients_are_those_of_dense_attention(target, kind, dtype):
    """The reference is dense attention in float64 over a whole mask, on the same numbers."""
    if kind == "flex" and not target.is_cuda:
        pytest.skip("FlexAttention has no backward pass on a CPU; test_segment_attention.py checks its forward pass")
    length = target.pick(small=200, cpu=1000, cuda=2000)  # no multiple of a block
    columns = layout_columns(length, target.name)
    inputs = attention_inputs(length, target.name, dtype, num_heads=2)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    token = torch.arange(length, device=target.name)
    seen = segments.mask_mod(*columns)(torch.zeros_like(token)[:1, None], token[:1], token[:, None], token[None])
    expected = dense_attention(*exact, seen[None], 64**-0.5)
    grad = torch.randn_like(expected)

    actual = attend(kind, inputs, columns)
    gradients = torch.autograd.grad(actual, inputs, grad.to(dtype))

    errors = [relative_error(actual, expected)]
    errors += map(relative_error, gradients, torch.autograd.grad(expected, exact, grad))
    report(target, f"{kind} attention, {dtype}: largest relative errors {', '.join(f'{each:.1e}' for each in errors)}")
    assert max(errors) < TOLERANCES[dtype]


def peak_of_step(target, kind, length, dtype):
    """Return seconds and extra bytes of a forward and backward pass with its mask, and the gradient of the query."""
    columns, inputs = layout_columns(length, target.name), attention_inputs(length, target.name, dtype)
    attend(kind, inputs, columns).sum().backward()  # compiles
    inputs[0].grad = inputs[1].grad = inputs[2].grad = None
    if target.is_cuda:
        torch.cuda.reset_peak_memory_stats(target.name)
        before = torch.cuda.memory_allocated(target.name)
    with target.freed() as took:
        attend(kind, inputs, columns).square().sum().backward()
    extra = torch.cuda.max_memory_allocated(target.name) - before if target.is_cuda else None
    return took.seconds, extra, inputs[0].grad


def test_long_records(target):
    """Neither kind needs the memory of a mask of all pairs, and both give the same gradients."""
    dtype = torch.bfloat16 if target.is_cuda else torch.float32
    for length in target.pick(small=(), cpu=(1024, 4096), cuda=(1024, 4096, 16384, 32768)):
        found = {}
        for kind in ("segment", "flex") if target.is_cuda else ("segment",):
            seconds, extra, found[kind] = peak_of_step(target, kind, length, dtype)
            memory = "not measured" if extra is None else f"{extra / 2**20:.0f} MiB"
            report(
                target, f"{kind} attention, {length} tokens, {dtype}: {seconds * 1000:.1f} ms, extra memory {memory}"
            )
            assert torch.isfinite(found[kind]).all()
            assert extra is None or length < 16384 or extra < length * length
        if len(found) == 2:
            assert relative_error(*found.values()) < TOLERANCES[dtype]
