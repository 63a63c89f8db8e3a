"""
Keys and values of many contexts in one pool of slots, and a forward pass of any causal language model over the pool.

A row reads its keys through a list of slots in any order: rows with a common prefix share slots, and a join is a longer
list. The keys contain their rotary positions. Visibility is an explicit additive mask. Without a mask, transformers
interprets jumps in positions as packed sequences, and a boolean mask is wrong under eager attention.
"""

# ruff: noqa: TID253 - imported after the engine has loaded torch

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from attrs import define, field, frozen
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache

from turnwise_engine_support.picture_families import placeholders_at
from turnwise_transformers_engine.layouts.context_tree import TRASH
from turnwise_transformers_engine.layouts.row_pictures import RowPictures, encoder_outputs

_FIRST_SLOTS = 2048

RowSources = tuple[RowPictures, NDArray[np.int64]]
"""The pictures of a row, and the (q,) rows of its queries' features, see `RowPictures.sources`."""


@frozen(eq=False)
class ForwardInput:
    """
    One forward pass: B rows of up to Q queries over up to L keys. Queries are right-aligned, keys left-aligned.

    Attributes:
        token_ids: (B, Q).
        positions: (B, Q), or (3, B, Q) in time, height and width if a row has pictures and the model has these axes.
        write: (B, Q) slots for the queries' keys and values; `TRASH` for padding and for tokens that are cached.
        read: (B, L) slots of the keys.
        visible: (B, Q, L) bool; every query attends to at least one key.
        pictures: of each row, None for text; empty if all queries are text.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    write: NDArray[np.int64]
    read: NDArray[np.int64]
    visible: NDArray[np.bool_]
    pictures: tuple[RowSources | None, ...] = ()


class SlotPool(Cache):
    """The pool, with the interface of a transformers cache. It grows on demand."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._num_slots = 0
        self._write: Tensor | None = None
        self._read: Tensor | None = None

    def reserve(self, num_slots: int) -> None:
        """Grow to contain slots up to this number."""
        if num_slots < self._num_slots:
            return
        self._num_slots = max(_FIRST_SLOTS, 2 * self._num_slots, num_slots + 1)
        for tensors in (self._keys, self._values):
            for index, old in enumerate(tensors):
                tensors[index] = old.new_zeros(self._num_slots, *old.shape[1:])
                tensors[index][: len(old)] = old

    @contextmanager
    def rows(self, write: Tensor, read: Tensor) -> Iterator[None]:
        """Set the slots that the next forward pass writes, (B, Q), and reads, (B, L)."""
        self._write, self._read = write, read
        try:
            yield
        finally:
            self._write = self._read = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Any, Any]:
        """Store (B, H, Q, D) keys and values of a layer, and return the ones that the rows read, (B, H, L, D)."""
        assert self._write is not None
        assert self._read is not None
        if layer_idx == len(self._keys):
            for tensors, states in ((self._keys, key_states), (self._values, value_states)):
                tensors.append(states.new_zeros(self._num_slots, states.shape[1], states.shape[3]))
        return (
            _exchange(self._keys[layer_idx], key_states, self._write, self._read),
            _exchange(self._values[layer_idx], value_states, self._write, self._read),
        )

    def get_seq_length(self, *_: object, **__: object) -> int:
        """Return 0, because positions are always given explicitly."""
        return 0

    @property
    def num_bytes(self) -> int:
        """Size of the pool."""
        return sum(t.numel() * t.element_size() for t in (*self._keys, *self._values))


def _exchange(pool: Tensor, states: Tensor, write: Tensor, read: Tensor) -> Tensor:
    # Write first: a row may read keys that another row of the same pass has just computed.
    pool[write.reshape(-1)] = states.transpose(1, 2).reshape(-1, *pool.shape[1:])
    return pool[read].transpose(1, 2)


@define(eq=False)
class PoolModel:
    """
    A model that reads and writes a pool.

    Attributes:
        model: provides the weights; its attention and config are not changed.
        alone: nothing else runs the model. Then it is copied at the first pass, which many runs never have.
    """

    model: Any
    alone: bool = False
    pool: SlotPool = field(factory=SlotPool, init=False)

    def __attrs_post_init__(self) -> None:
        if not self.alone:
            # Before the manager's thread runs the model: a module that runs may change while it is copied.
            _ = self._twin

    @cached_property
    def _twin(self) -> Any:
        return _copy_with_shared_tensors(self.model)

    @torch.inference_mode()
    def forward(self, batch: ForwardInput, num_slots: int) -> Tensor:
        """Return (B, V) logits of the last query of each row."""
        self.pool.reserve(num_slots)
        device, dtype = self.model.device, self.model.dtype
        visible = torch.from_numpy(batch.visible).to(device)[:, None]
        mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, torch.finfo(dtype).min)
        ids, positions, write, read = (
            torch.from_numpy(array).to(device) for array in (batch.token_ids, batch.positions, batch.write, batch.read)
        )
        twin = self._shared_twin()
        with self.pool.rows(write, read), _read_pictures(twin, batch) as features:
            output = twin(
                input_ids=ids,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=self.pool,
                use_cache=True,
                logits_to_keep=1,
                **features,
            )
        logits: Tensor = output.logits[:, -1]
        return logits

    def free(self) -> None:
        """Free the pool's memory."""
        self.pool = SlotPool()

    def _shared_twin(self) -> Any:
        # Shared again at each pass, because sleep or a weight update may have replaced the tensors.
        theirs = dict(self.model.named_modules(remove_duplicate=False))
        for name, module in self._twin.named_modules(remove_duplicate=False):
            module._parameters.update(theirs[name]._parameters)  # noqa: SLF001 - shared, not copied
            module._buffers.update(theirs[name]._buffers)  # noqa: SLF001 - shared, not copied
        return self._twin


@contextmanager
def _read_pictures(model: object, batch: ForwardInput) -> Iterator[dict[str, Any]]:
    """Give the model's arguments for the features of pictures, which it places during the block; none for text."""
    if not batch.pictures:
        yield {}
        return
    outputs, mask = encoder_outputs(model, batch.pictures, batch.token_ids.shape[1])
    with placeholders_at(model, mask):
        yield {"mm_encoder_outputs": outputs}


def _copy_with_shared_tensors(model: Any) -> Any:
    """
    Return a copy of a model with `sdpa` attention and the same tensors.

    The manager may have switched the model itself to an attention that needs a paged cache.
    """
    tensors = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    twin.config._attn_implementation = "sdpa"  # noqa: SLF001 - transformers itself sets it so
    return twin


def pad_rows(rows: list[NDArray[Any]], *, right_aligned: bool, fill: int = TRASH) -> NDArray[np.int64]:
    """Pad rows of different lengths to (B, longest)."""
    width = max(map(len, rows))
    result = np.full((len(rows), width), fill, np.int64)
    for index, row in enumerate(rows):
        result[index, width - len(row) if right_aligned else 0 :][: len(row)] = row
    return result
