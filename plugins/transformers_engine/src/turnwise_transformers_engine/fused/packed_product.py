"""
Products with weights that are laid out once for the processor's kernels, by oneDNN.

A matrix product first copies its weights into an order that its kernel reads at full speed. With few rows that copy
takes longer than the product, and every step repeats it. Here the copy is kept, in float32 or rounded to bfloat16.
"""

# ruff: noqa: TID253, SLF001 - imported after the engine has loaded torch, whose packed products are private

from __future__ import annotations

from typing import Final

import torch
from attrs import define, field
from torch import Tensor
from torch.nn.functional import linear

SMALLEST: Final = 1 << 18
"""Fewest weights of a matrix to pack: a call costs about 10 microseconds more, which a smaller product cannot save."""

_ROWS: Final = 64
"""The number of rows for which oneDNN chooses the layout. Its layout for one row is slow with many; this suits all."""


@define(eq=False)
class Product:
    """
    The product of rows with a weight of the model.

    Attributes:
        weight: (out, in) float32.
        bias: (out,), or None.
        packed_dtype: of a packed copy of the weight, which is made at the first product after `refresh`; None keeps no
            copy. With bfloat16 the inputs are rounded too, and sums are float32 within the product only.
    """

    weight: Tensor
    bias: Tensor | None = None
    packed_dtype: torch.dtype | None = None
    _packed: Tensor | None = field(default=None, init=False)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return (N, out) products of (N, in) rows."""
        if self.packed_dtype is None:
            return linear(rows, self.weight, self.bias)
        rounded = rows.to(self.packed_dtype)
        bias = None if self.bias is None else self.bias.to(self.packed_dtype)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rounded, self._pack(), bias, "none", [], "")
        return product.float()

    def added(self, rows: Tensor, sums: Tensor) -> Tensor:
        """Return (N, out) products of (N, in) rows, plus (N, out) sums; for a weight without a bias."""
        if self.packed_dtype is None:
            return torch.addmm(sums, rows, self.weight.t())
        if self.packed_dtype != torch.float32:
            return self(rows).add_(sums)  # the sums keep all their digits
        product: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, sums, self._pack(), None, "add")
        return product

    def refresh(self) -> None:
        """Drop the copy, because the weight was changed in place."""
        self._packed = None

    def _pack(self) -> Tensor:
        if self._packed is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.to(self.packed_dtype), _ROWS)
        return self._packed


def packing_refusal(dtype: torch.dtype = torch.float32) -> str:
    """Return the reason why this processor or this torch packs no weights in a dtype, or an empty text."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch leaves it so
        return "torch has no oneDNN"
    weight, rows = torch.eye(32), torch.ones(2, 32)
    product = Product(weight, packed_dtype=dtype)
    try:
        if dtype == torch.bfloat16 and not (
            torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        ):
            return "the processor has no instructions for bfloat16"
        # These functions are private to torch: another version may lack them.
        same = torch.equal(product(rows), rows) and torch.equal(product.added(rows, rows), 2 * rows)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return "" if same else "a packed product differs"
