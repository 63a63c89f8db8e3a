"""
Padding: moves the tokens of rows between packed and padded tensors.

Copies run over whole rows; no Python loop runs over tokens.

Shapes: B rows, one per trajectory; N tokens of all rows, M of them in responses; P prompt columns, R response columns,
T = P + R.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypedDict, TypeVar

import numpy as np
from attrs import frozen
from numpy.typing import DTypeLike

from turnwise.batch.columns import Alignment
from turnwise.errors import PluginError, TrajectoryError

if TYPE_CHECKING:
    from torch import Tensor

Values = TypeVar("Values", "np.ndarray", "Tensor")


class Widths(TypedDict, total=False):
    """
    The numbers of columns of a padded batch.

    Attributes:
        prompt_length: P; None takes the longest prompt.
        response_length: R; None takes the longest response.
        pad_to_multiple_of: rounds P and R up where they are not given.
    """

    prompt_length: int | None
    response_length: int | None
    pad_to_multiple_of: int


@frozen(kw_only=True)
class Padding:
    """The place of each row's real tokens: the prompt ends before column P, and the response starts there."""

    prompt_lens: Sequence[int]  # B of them
    response_lens: Sequence[int]  # B of them
    prompt_length: int  # P
    response_length: int  # R

    @classmethod
    def fitting(
        cls,
        prompt_lens: Sequence[int],
        response_lens: Sequence[int],
        prompt_length: int | None = None,
        response_length: int | None = None,
        pad_to_multiple_of: int = 1,
    ) -> Padding:
        """Return the padding that fits some rows; arguments as in `Widths`, errors as in `padded_length`."""
        return cls(
            prompt_lens=prompt_lens,
            response_lens=response_lens,
            prompt_length=padded_length(prompt_lens, prompt_length, pad_to_multiple_of, "prompt"),
            response_length=padded_length(response_lens, response_length, pad_to_multiple_of, "response"),
        )

    def pad(self, flat: Tensor, alignment: Alignment, fill: float = 0) -> Tensor:
        """Return (N, ...) values as (B, T, ...), and (M, ...) ones of responses as (B, R, ...); (B,) stays."""
        if alignment == "row":
            return flat
        values = as_array(flat)
        if values is not None:
            return self.pad_rows(self._rows(values, alignment), alignment, values.dtype, fill, flat.shape[1:])
        padded = flat.new_full((*self._shape(alignment), *flat.shape[1:]), fill)
        self._place(self._rows(flat, alignment), padded, alignment)
        return padded

    def pad_rows(
        self,
        rows: Iterable[np.ndarray],
        alignment: Alignment,
        dtype: DTypeLike,
        fill: float = 0,
        trailing: Sequence[int] = (),
    ) -> Tensor:
        """Return B arrays, of all tokens of a row or of its response, as one (B, T, ...) or (B, R, ...)."""
        import torch

        shape = (*self._shape(alignment), *trailing)
        padded = np.full(shape, fill, dtype) if fill else np.zeros(shape, dtype)
        self._place(rows, padded, alignment)
        return torch.from_numpy(padded)

    def mask(self) -> Tensor:
        """Return (B, T) uint8: 1 on real tokens."""
        pairs = zip(self.prompt_lens, self.response_lens, strict=True)
        return self.pad_rows((np.ones(prompt + response, np.uint8) for prompt, response in pairs), "token", np.uint8)

    def _shape(self, alignment: Alignment) -> tuple[int, int]:
        prompt_length = self.prompt_length if alignment == "token" else 0
        return len(self.prompt_lens), prompt_length + self.response_length

    def _rows(self, flat: Values, alignment: Alignment) -> Iterator[Values]:
        stop = 0
        for prompt, response in zip(self.prompt_lens, self.response_lens, strict=True):
            start, stop = stop, stop + response + (prompt if alignment == "token" else 0)
            yield flat[start:stop]

    def _place(self, rows: Iterable[Values], padded: Values, alignment: Alignment) -> None:
        if alignment == "response":
            for row, (values, response) in enumerate(zip(rows, self.response_lens, strict=True)):
                padded[row, :response] = values
            return
        lens = zip(rows, self.prompt_lens, self.response_lens, strict=True)
        for row, (values, prompt, response) in enumerate(lens):
            padded[row, self.prompt_length - prompt : self.prompt_length + response] = values

    def unpad(self, padded: Tensor, alignment: Alignment) -> Tensor:
        """Return (B, T, ...) values as (N, ...), and (B, R, ...) ones as (M, ...): the inverse of `pad`."""
        import torch

        if alignment == "row":
            return padded
        pieces = [padded.new_empty((0, *padded.shape[2:]))]
        for row, (prompt, response) in enumerate(zip(self.prompt_lens, self.response_lens, strict=True)):
            first = self.prompt_length - prompt if alignment == "token" else 0
            size = response + (prompt if alignment == "token" else 0)
            pieces.append(padded[row, first : first + size])
        return torch.cat(pieces)


def join_rows(rows: Sequence[np.ndarray], dtype: DTypeLike, trailing: Sequence[int] = ()) -> np.ndarray:
    """Return arrays end to end, (N, ...) or (M, ...), of a type; there may be none."""
    joined = np.empty((sum(map(len, rows)), *trailing), dtype)
    stop = 0
    for values in rows:
        start, stop = stop, stop + len(values)
        joined[start:stop] = values
    return joined


def as_array(tensor: Tensor) -> np.ndarray | None:
    """
    Return a numpy array that shares the memory of a tensor; None when numpy cannot represent it.

    numpy copies in the calling thread. torch wakes its threads for every larger copy, which takes many times as long
    as the copy when the machine is busy.
    """
    if tensor.device.type != "cpu" or tensor.requires_grad:
        return None
    try:
        return tensor.numpy()
    except TypeError:  # a type of torch alone, such as bfloat16
        return None


def find_alignment(name: str, shape: tuple[int, ...], size: int, response_length: int, total_length: int) -> Alignment:
    """
    Return the alignment of a field of a padded batch of `size` rows, from its shape.

    Raises:
        PluginError: the shape is none of (B,), (B, R, ...) and (B, T, ...).
    """
    if shape == (size,):
        return "row"
    if shape[:2] == (size, response_length):
        return "response"
    if shape[:2] == (size, total_length):
        return "token"
    wanted = f"({size},), ({size}, {response_length}, ...) or ({size}, {total_length}, ...)"
    raise PluginError(f"field {name!r} has shape {shape}, expected {wanted}")


def padded_length(lengths: Sequence[int], fixed: int | None, multiple_of: int, part: str) -> int:
    """
    Return the number of columns that hold rows of these lengths: `fixed`, or the longest row rounded up.

    Raises:
        TrajectoryError: a row is longer than `fixed`; cutting it here would change what was sampled.
    """
    if multiple_of < 1:
        raise TrajectoryError(f"'pad_to_multiple_of' must be at least 1, not {multiple_of}")
    longest = max(lengths, default=0)
    if fixed is None:
        return -(-longest // multiple_of) * multiple_of
    if longest > fixed:
        raise TrajectoryError(f"row {lengths.index(longest)} has {longest} {part} tokens, '{part}_length' is {fixed}")
    return fixed
