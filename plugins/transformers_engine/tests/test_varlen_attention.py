"""Attention over many sequences at once equals the attention of each sequence alone."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise_transformers_engine.manager.varlen_attention import register, varlen_attention

HEADS, GROUPS, DEPTH = 4, 2, 8


class SlidingCache:
    """A fake cache of layers with a sliding window, which returns concatenated keys and values."""

    def __init__(self, keys, values, starts):
        self.keys, self.values, self.starts = keys, values, starts
        self.layer_to_allocator = {0: SimpleNamespace(layer_type="sliding_attention", index=0, layer_indices=[0])}

    def options(self, _new):
        """Return the keyword arguments that the manager passes to layers."""
        return {}

    def update(self, *, key_states, value_states, layer_idx, kwargs):
        """Return the keys and values of old and new tokens."""
        kwargs["cu_seq_lens_k"] = self.starts
        return self.keys, self.values


class PagedCache:
    """A fake cache of layers with full attention: pages of four tokens in random order, padded with garbage."""

    PAGE = 4

    def __init__(self, keys, values, starts):
        self.starts, lengths = starts, starts.diff().tolist()
        num_pages = [-(-length // self.PAGE) for length in lengths]
        order = torch.randperm(sum(num_pages)).split(num_pages)
        slots = [
            (pages[:, None] * self.PAGE + torch.arange(self.PAGE)).flatten()[:length]
            for pages, length in zip(order, lengths, strict=True)
        ]
        self.slots = torch.cat(slots)
        pool = torch.full((2, sum(num_pages) * self.PAGE, GROUPS, DEPTH), 1e9)
        pool[:, self.slots] = torch.stack([keys[0], values[0]]).transpose(1, 2)
        allocator = SimpleNamespace(
            layer_type="full_attention",
            index=0,
            layer_indices=[0],
            tokens_per_page=self.PAGE,
            _kv_token_views={0: (pool[0], pool[1])},
        )
        self.layer_to_allocator = {0: allocator}

    def options(self, new):
        """Return the keyword arguments that the manager passes to layers; no read slots if all tokens are new."""
        ends = self.starts[1:].tolist()
        write = torch.cat([self.slots[end - count : end] for end, count in zip(ends, new, strict=True)])
        read = self.slots if len(write) < len(self.slots) else self.slots[:0]
        return {"cu_seq_lens_k": {"full_attention": self.starts}, "read_index": [read], "write_index": [write]}


def packed(lengths):
    """Return the bounds of sequences with these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def alone(query, key, value, window):
    """Return the attention of the last tokens of one sequence to all its tokens, by explicit softmax."""
    num_new, num_all = query.shape[1], key.shape[1]
    key, value = key.repeat_interleave(HEADS // GROUPS, 0), value.repeat_interleave(HEADS // GROUPS, 0)
    rows, columns = torch.arange(num_all - num_new, num_all)[:, None], torch.arange(num_all)[None]
    visible = (columns <= rows) & (columns > rows - (window or num_all))
    scores = (query @ key.transpose(1, 2) * 0.3).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(0, 1)


NUM_NEW = st.sampled_from([1, 1, 1, 2, 3, 4, 5, 130])


@settings(deadline=None, max_examples=60)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 9), NUM_NEW), min_size=1, max_size=9),
    kind=st.sampled_from([SlidingCache, PagedCache]),
    window=st.sampled_from([None, 1, 3]),
    num_padding=st.integers(0, 2),
)
def test_every_sequence_attends_to_its_own_keys(sequences, kind, window, num_padding):
    """For any mix of prefill and decode, with and without a sliding window and padding."""
    torch.manual_seed(0)
    new, known = [count for _past, count in sequences], [past + count for past, count in sequences]
    query = torch.randn(1, HEADS, sum(new) + num_padding, DEPTH)
    keys, values = torch.randn(2, sum(known), GROUPS, DEPTH).transpose(1, 2)[:, None]
    cache = kind(keys, values, packed(known))
    window = window if kind is SlidingCache else None
    # New tokens are in the pool already and are written again. The step may be padded after the last token.
    ends = packed(known)[1:].tolist()
    fresh = torch.cat([torch.arange(end - count, end) for end, count in zip(ends, new, strict=True)])
    out, _weights = varlen_attention(
        SimpleNamespace(layer_idx=0),
        query,
        keys[:, :, fresh],
        values[:, :, fresh],
        None,
        scaling=0.3,
        sliding_window=window,
        cache=cache,
        cu_seq_lens_q=packed(new),
        **cache.options(new),
    )

    assert out.shape == (1, sum(new) + num_padding, HEADS, DEPTH)
    assert out.isfinite().all()
    starts_q, starts_k = packed(new).tolist(), packed(known).tolist()
    for index in range(len(sequences)):
        own, all_ = slice(*starts_q[index : index + 2]), slice(*starts_k[index : index + 2])
        expected = alone(query[0, :, own], keys[0, :, all_], values[0, :, all_], window)
        assert torch.allclose(out[0, own], expected, atol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_calls_without_a_cache_use_transformers_sdpa(tiny_model, implementation):
    """Without a paged cache the result is the same as with `sdpa` or `eager`."""
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([[3, 5, 7, 9, 11]])
    logits = [
        AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation=name)(input_ids=ids).logits
        for name in (register(), implementation)
    ]
    assert torch.allclose(*logits, atol=1e-5)
