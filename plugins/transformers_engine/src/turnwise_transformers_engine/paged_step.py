"""
What the sequences of one step read from the manager's paged cache.

The manager hands out the keys of all sequences end to end, token by token. Here those with few new tokens get whole
pages, padded into one tensor for all that are alike: one copy, in pieces as large as a page, into memory that is used
again.
"""

# ruff: noqa: TID253 - loaded by an engine that has loaded torch

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from attrs import define, field, frozen
from torch import Tensor

_LEAST_ROWS = 16
"""Fewer sequences that decode than this are not worth a call of their own."""

_SIZES = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""Up to how many new tokens are alike; a sequence with more than the last has work enough for a call of its own."""

_MOST_SEEN = 1 << 22
"""Pairs of a new token and one that it may see, padding included, that one call looks at."""


@frozen(eq=False)
class Alone:
    """
    A sequence with many new tokens.

    Attributes:
        new: where these stand among the new tokens of the step.
        slots: (K,) of all its tokens in the pool.
    """

    new: slice
    slots: Tensor


@frozen(eq=False)
class Together:
    """
    S sequences of similar length, with up to Q new tokens each; each reads P pages of T tokens.

    Attributes:
        rows: (S, Q) where their tokens stand among the new tokens of the step; behind its end each has its last again.
        pages: (S * P,) that they read; behind its end each reads its first page.
        seen: (S, 1, Q, P * T) bool, what each new token sees of these pages.
    """

    rows: Tensor
    pages: Tensor
    seen: Tensor


@frozen(eq=False)
class StepPlan:
    """
    What all layers of one kind share in a step.

    Attributes:
        together: most sequences.
        alone: the other ones.
    """

    together: tuple[Together, ...]
    alone: tuple[Alone, ...]


@frozen(eq=False)
class LayerPool:
    """
    Keys and values of a layer.

    Attributes:
        keys: (N, G, D), by slot.
        values: of the same shape.
        page_size: tokens of a page.
        slots: (M,) of the tokens of all sequences, end to end.
        starts: (sequences + 1,) int64, where they begin among these.
        kind: plans are shared by the layers of a kind.
        is_first: whether it is the first of its kind in the step.
    """

    keys: Tensor
    values: Tensor
    page_size: int
    slots: Tensor
    starts: Tensor
    kind: int
    is_first: bool


@define(eq=False)
class _Memory:
    """Plans of the running step by kind, and the two tensors that pages are copied into."""

    plans: dict[int, StepPlan] = field(factory=dict)
    buffers: dict[str, Tensor] = field(factory=dict)


_MEMORIES: WeakKeyDictionary[Any, _Memory] = WeakKeyDictionary()


def forget(cache: Any) -> None:
    """Give back what the steps of a cache keep between them."""
    _MEMORIES.pop(cache, None)


def written(cache: Any, layer: int, key: Tensor, value: Tensor, options: dict[str, Any]) -> LayerPool:
    """
    Write the new keys and values of a layer, (1, G, N, D), and say where everything is that may be read.

    A layer with full attention is read where it is. One with a sliding window writes over what it reads in the same
    step, so there the cache's own copy is taken, whose pages are single tokens.
    """
    allocator = cache.layer_to_allocator[layer]
    is_first = layer == allocator.layer_indices[0]
    if allocator.layer_type != "full_attention":
        keys, values = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=options)
        starts = options["cu_seq_lens_k"].long()
        slots = torch.arange(keys.shape[2], device=keys.device)
        return LayerPool(
            keys[0].transpose(0, 1), values[0].transpose(0, 1), 1, slots, starts, allocator.index, is_first
        )
    write, read = options["write_index"][allocator.index], options["read_index"][allocator.index]
    keys, values = allocator._kv_token_views[layer]  # noqa: SLF001 - there is no public way to the pool
    keys.index_copy_(0, write, key[0].transpose(0, 1))
    values.index_copy_(0, write, value[0].transpose(0, 1))
    starts = options["cu_seq_lens_k"][allocator.layer_type].long()
    # Without anything to read but what is new, the manager names that only where it is written.
    slots = read if len(read) else write
    return LayerPool(keys, values, allocator.tokens_per_page, slots, starts, allocator.index, is_first)


def plan_of(cache: Any, pool: LayerPool, starts_q: Tensor, window: int | None) -> StepPlan:
    """Return the plan of a step: made by the first layer of a kind, and found by the others."""
    memory = _MEMORIES.setdefault(cache, _Memory())
    if pool.is_first:
        memory.plans[pool.kind] = _planned(pool, starts_q.long(), window)
    return memory.plans[pool.kind]


def _planned(pool: LayerPool, starts_q: Tensor, window: int | None) -> StepPlan:
    num_new, lengths = starts_q.diff(), pool.starts.diff()
    together, alone = [], (num_new > _SIZES[-1]).nonzero().squeeze(1).tolist()
    for some in _alike(num_new, lengths):
        if len(some) == 1 and num_new[some[0]] > 1:
            alone.append(int(some[0]))
        else:
            together.append(_together(pool, starts_q[some], num_new[some], pool.starts[some], lengths[some], window))
    ends_q, ends_k = starts_q.tolist(), pool.starts.tolist()
    singled_out = (
        Alone(slice(*ends_q[index : index + 2]), pool.slots[slice(*ends_k[index : index + 2])]) for index in alone
    )
    return StepPlan(tuple(together), tuple(singled_out))


def _alike(num_new: Tensor, lengths: Tensor) -> Iterator[Tensor]:
    """Yield which sequences are padded into one batch: what is padded is computed, and read."""
    by_length = lengths.argsort()
    size = torch.bucketize(num_new[by_length], torch.tensor(_SIZES, device=num_new.device))
    for number in range(1, len(_SIZES)):
        some = by_length[size == number]
        if not len(some):
            continue
        pairs = len(some) * int(num_new[some].max()) * int(lengths[some].max())
        parts = max(-(-pairs // _MOST_SEEN), min(4, len(some) // _LEAST_ROWS) if _SIZES[number] == 1 else 1)
        yield from some.tensor_split(min(parts, len(some)))


def _together(
    pool: LayerPool, starts_q: Tensor, num_new: Tensor, starts: Tensor, lengths: Tensor, window: int | None
) -> Together:
    page = torch.arange(0, int(lengths.max()), pool.page_size, device=starts.device)[None]
    begins = torch.where(page < lengths[:, None], starts[:, None] + page, starts[:, None])
    pages = (pool.slots[begins.flatten()] // pool.page_size).long()
    offset = torch.arange(int(num_new.max()), device=starts.device).minimum(num_new[:, None] - 1)
    last = (lengths - num_new)[:, None, None] + offset[..., None]
    token = torch.arange(page.shape[1] * pool.page_size, device=starts.device)
    seen = token <= last
    if window is not None:
        seen &= token > last - window
    return Together(starts_q[:, None] + offset, pages, seen[:, None])


def padded(cache: Any, name: str, tokens: Tensor, pages: Tensor, page_size: int, num_rows: int) -> Tensor:
    """
    Return (S, P * T, G, D): whole pages of each row. The memory is that of the last call of this name.

    Args:
        cache: whose memory is used.
        name: of the memory.
        tokens: (N, G, D) of a layer.
        pages: (S * P,) numbers.
        page_size: T.
        num_rows: S.
    """
    num_pages = len(tokens) // page_size
    paged = tokens[: num_pages * page_size].view(num_pages, -1)
    buffers = _MEMORIES[cache].buffers
    size = len(pages) * paged.shape[1]
    if name not in buffers or buffers[name].numel() < size:
        buffers[name] = tokens.new_empty(size)
    out = buffers[name][:size].view(len(pages), -1)
    torch.index_select(paged, 0, pages, out=out)
    return out.view(num_rows, -1, *tokens.shape[1:])
