"""
Reads of one step from the manager's paged KV cache.

The manager concatenates the keys of all sequences token by token. Here sequences with few new tokens read whole pages
instead, and similar sequences are padded into one tensor: a single copy in page-sized pieces, into a reused buffer.
"""

# ruff: noqa: TID253 - imported after the engine has loaded torch

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from attrs import define, field, frozen
from torch import Tensor

_MIN_ROWS = 16
"""Fewest decoding sequences that are worth a separate batch."""

_SIZES = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""Bounds of the groups by number of new tokens; a sequence with more than the last runs alone."""

_MAX_PAIRS = 1 << 22
"""Most pairs of a new token and a key in one batch, padding included."""


@frozen(eq=False)
class SingleSequence:
    """
    A sequence with many new tokens.

    Attributes:
        new: slice of its new tokens among those of the step.
        slots: (K,) slots of all its tokens in the pool.
    """

    new: slice
    slots: Tensor


@frozen(eq=False)
class SequenceBatch:
    """
    S sequences of similar length, with up to Q new tokens each; each reads P pages of T tokens.

    Attributes:
        rows: (S, Q) indices of their tokens among the new tokens of the step; a shorter row repeats its last one.
        pages: (S * P,) page numbers; a shorter sequence repeats its first page.
        visible: (S, 1, Q, P * T) bool, the tokens of these pages that each new token attends to.
    """

    rows: Tensor
    pages: Tensor
    visible: Tensor


@frozen(eq=False)
class StepPlan:
    """
    The reads of a step, shared by all layers of one kind.

    Attributes:
        batches: sequences that are padded together.
        singles: the others.
    """

    batches: tuple[SequenceBatch, ...]
    singles: tuple[SingleSequence, ...]


@frozen(eq=False)
class LayerPool:
    """
    Keys and values of a layer.

    Attributes:
        keys: (N, G, D), by slot.
        values: of the same shape.
        page_size: tokens of a page.
        slots: (M,) slots of the tokens of all sequences, concatenated.
        starts: (sequences + 1,) int64, start of each sequence in `slots`.
        kind: layers of one kind share their plans.
        is_first: whether the layer is the first of its kind in the step.
    """

    keys: Tensor
    values: Tensor
    page_size: int
    slots: Tensor
    starts: Tensor
    kind: int
    is_first: bool


@define(eq=False)
class _StepState:
    """Plans of the running step by kind, and the two buffers that pages are copied into."""

    plans: dict[int, StepPlan] = field(factory=dict)
    buffers: dict[str, Tensor] = field(factory=dict)


_STATES: WeakKeyDictionary[Any, _StepState] = WeakKeyDictionary()


def forget(cache: object) -> None:
    """Free the buffers that are kept for a cache between its steps."""
    _STATES.pop(cache, None)


def write_keys_values(cache: Any, layer: int, key: Tensor, value: Tensor, options: dict[str, Any]) -> LayerPool:
    """
    Write the new keys and values of a layer, (1, G, N, D), and return the pool to read from.

    Layers with full attention are read in place. A layer with a sliding window overwrites keys that it reads in the
    same step, so there the cache's own copy is used, as pages of one token.
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
    keys, values = allocator._kv_token_views[layer]  # noqa: SLF001 - transformers has no public way to the pool
    keys.index_copy_(0, write, key[0].transpose(0, 1))
    values.index_copy_(0, write, value[0].transpose(0, 1))
    starts = options["cu_seq_lens_k"][allocator.layer_type].long()
    # If all tokens are new, the manager lists them only under the write slots.
    slots = read if len(read) else write
    return LayerPool(keys, values, allocator.tokens_per_page, slots, starts, allocator.index, is_first)


def get_plan(cache: object, pool: LayerPool, starts_q: Tensor, window: int | None) -> StepPlan:
    """Return the plan of a step. The first layer of a kind makes it, and the others reuse it."""
    state = _STATES.setdefault(cache, _StepState())
    if pool.is_first:
        state.plans[pool.kind] = _make_plan(pool, starts_q.long(), window)
    return state.plans[pool.kind]


def _make_plan(pool: LayerPool, starts_q: Tensor, window: int | None) -> StepPlan:
    num_new, lengths = starts_q.diff(), pool.starts.diff()
    batches, singles = [], (num_new > _SIZES[-1]).nonzero().squeeze(1).tolist()
    for group in _similar_groups(num_new, lengths):
        if len(group) == 1 and num_new[group[0]] > 1:
            singles.append(int(group[0]))
        else:
            batch = _make_batch(pool, starts_q[group], num_new[group], pool.starts[group], lengths[group], window)
            batches.append(batch)
    ends_q, ends_k = starts_q.tolist(), pool.starts.tolist()
    single_sequences = (
        SingleSequence(slice(*ends_q[index : index + 2]), pool.slots[slice(*ends_k[index : index + 2])])
        for index in singles
    )
    return StepPlan(tuple(batches), tuple(single_sequences))


def _similar_groups(num_new: Tensor, lengths: Tensor) -> Iterator[Tensor]:
    """Yield groups of sequences to pad together. Similar sequences waste little: padding is read and computed too."""
    by_length = lengths.argsort()
    size = torch.bucketize(num_new[by_length], torch.tensor(_SIZES, device=num_new.device))
    for number in range(1, len(_SIZES)):
        group = by_length[size == number]
        if not len(group):
            continue
        pairs = len(group) * int(num_new[group].max()) * int(lengths[group].max())
        parts = max(-(-pairs // _MAX_PAIRS), min(4, len(group) // _MIN_ROWS) if _SIZES[number] == 1 else 1)
        yield from group.tensor_split(min(parts, len(group)))


def _make_batch(
    pool: LayerPool, starts_q: Tensor, num_new: Tensor, starts: Tensor, lengths: Tensor, window: int | None
) -> SequenceBatch:
    page = torch.arange(0, int(lengths.max()), pool.page_size, device=starts.device)[None]
    first = torch.where(page < lengths[:, None], starts[:, None] + page, starts[:, None])
    pages = (pool.slots[first.flatten()] // pool.page_size).long()
    offset = torch.arange(int(num_new.max()), device=starts.device).minimum(num_new[:, None] - 1)
    last = (lengths - num_new)[:, None, None] + offset[..., None]
    token = torch.arange(page.shape[1] * pool.page_size, device=starts.device)
    visible = token <= last
    if window is not None:
        visible &= token > last - window
    return SequenceBatch(starts_q[:, None] + offset, pages, visible[:, None])


def gather_pages(cache: object, name: str, tokens: Tensor, pages: Tensor, page_size: int, num_rows: int) -> Tensor:
    """
    Return (S, P * T, G, D): whole pages of each row. The next call with the same name reuses the memory.

    Args:
        cache: owner of the buffers.
        name: name of the buffer.
        tokens: (N, G, D) keys or values of a layer.
        pages: (S * P,) page numbers.
        page_size: T.
        num_rows: S.
    """
    num_pages = len(tokens) // page_size
    paged = tokens[: num_pages * page_size].view(num_pages, -1)
    buffers = _STATES[cache].buffers
    size = len(pages) * paged.shape[1]
    if name not in buffers or buffers[name].numel() < size:
        buffers[name] = tokens.new_empty(size)
    out = buffers[name][:size].view(len(pages), -1)
    torch.index_select(paged, 0, pages, out=out)
    return out.view(num_rows, -1, *tokens.shape[1:])
