"""Decides whether a loaded model can use the fused forward pass: it must agree with the model's own."""

# ruff: noqa: TID253 - imported after the engine has loaded torch

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from turnwise_transformers_engine.fused.model import Chunk, FusedModel, refusal
from turnwise_transformers_engine.fused.native_kernel import load_operators
from turnwise_transformers_engine.fused.packed_product import SMALLEST, packing_refusal
from turnwise_transformers_engine.fused.slab import Slab

_NUM_ROWS: Final = 3
_NUM_TOKENS: Final = 24
_TOLERANCE: Final = 1e-4
"""Largest difference of two logits, relative to the largest logit. Rounding in float32 stays below a tenth of it."""


_ROUGH_TOLERANCE: Final = 0.1
"""As `_TOLERANCE`, for products in bfloat16, in which a model of 30 layers differed by 0.02."""


def fuse(
    model: object, max_context: int, *, packs: bool, product_dtype: torch.dtype = torch.float32
) -> tuple[FusedModel | None, str]:
    """
    Return the fused model, and a text for the log: the reason if there is none, or what it lacks.

    The model's logits for random ids are compared with prefills, chunks and single tokens of the fused one.

    Args:
        model: of transformers.
        max_context: most positions.
        packs: pack large weights. They and the C operators are left out if they change the logits.
        product_dtype: of the products of large weights; bfloat16 packs them whatever `packs` is. There is no fused
            model if this is impossible.
    """
    if product_dtype == torch.float32:
        return _fuse(model, max_context, packs=packs)
    if reason := _packing_refusal(model, product_dtype):
        return None, reason
    exact, text = _fuse(model, max_context, packs=False)
    if exact is None:
        return None, text
    rounded = FusedModel(model, max_context, SMALLEST, product_dtype, exact.operators)
    difference = largest_difference(rounded)
    if difference > _ROUGH_TOLERANCE:
        return None, f"rounded products change logits by {difference:.1g} of the largest"
    rounding = (
        f"products in {str(product_dtype).removeprefix('torch.')} change logits by {difference:.1g} of the largest"
    )
    return rounded, "; ".join(filter(None, (text, rounding)))


def _fuse(model: Any, max_context: int, *, packs: bool) -> tuple[FusedModel | None, str]:
    """Return a fused model whose logits equal the model's own up to rounding in float32; see `fuse`."""
    if reason := refusal(model):
        return None, reason
    native = load_operators() if model.device.type == "cpu" else f"the device is {model.device.type}"
    packing = _packing_refusal(model, torch.float32) if packs else ""
    lacking = [f"no C operators: {native}"] if isinstance(native, str) else []
    lacking += [f"no packed weights: {packing}"] if packing else []
    fused = FusedModel(model, max_context, SMALLEST if packs and not packing else None)
    if not isinstance(native, str):
        fused.operators = native
    if (difference := largest_difference(fused)) <= _TOLERANCE:
        return fused, "; ".join(lacking)
    lacking = [f"C operators or packed weights change logits by {difference:.1g} of the largest"]
    fused = FusedModel(model, max_context)
    if (difference := largest_difference(fused)) > _TOLERANCE:
        return None, f"its logits differ by {difference:.1g} of the largest"
    return fused, lacking[0]


def _packing_refusal(model: Any, dtype: torch.dtype) -> str:
    device = model.device.type
    return packing_refusal(dtype) if device == "cpu" else f"the device is {device}"


@torch.inference_mode()
def largest_difference(fused: FusedModel) -> float:
    """Return the largest difference to the model's own logits, relative to the largest of these."""
    model = fused.model
    length = min(_NUM_TOKENS, fused.max_context)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (_NUM_ROWS, length), generator=generator).to(model.device)
    expected = model(input_ids=ids).logits
    worst = 0.0
    for position, logits in _steps(fused, ids):
        worst = max(worst, float((logits - expected[:, position]).abs().max()))
    return worst / max(float(expected.abs().max()), 1e-9)


def _steps(fused: FusedModel, ids: Tensor) -> list[tuple[int, Tensor]]:
    """Return positions and (rows, V) logits: half of the ids in two prefills, and the others one by one."""
    rows, length = ids.shape
    slab = Slab.make(length, fused.num_layers, fused.num_groups, fused.depth, ids.device)
    slab.reserve(rows)
    bounds = sorted({0, length // 4, length // 2})
    steps = []
    for start, end in pairwise(bounds):
        chunks = [Chunk(slab, row, start, ids[row, start:end].tolist()) for row in range(rows)]
        steps.append((end - 1, fused.prefill(chunks)))
    for position in range(length // 2, length):
        positions = torch.full((rows,), position, device=ids.device)
        steps.append((position, fused.decode(ids[:, position], positions, [(slab, rows, position + 1)])))
    return steps
