"""Arrays of token ids and of numbers, and their conversion from what callers have."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

TokenArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
Array = NDArray[np.generic]


def as_token_array(token_ids: ArrayLike) -> TokenArray:
    """Return a one-dimensional int32 array of the ids; a `ValueError` names any other shape or kind."""
    array = np.asarray(token_ids)
    if array.ndim != 1:
        raise ValueError(f"token ids must be one-dimensional, got shape {array.shape}")
    if array.dtype == np.int32 or array.size == 0:
        return array.astype(np.int32, copy=False)
    if array.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers, got {array.dtype}")
    # Read as unsigned, a negative id is above the limit too: one pass over the ids checks both ends.
    if np.maximum.reduce(array.astype(np.uint64, copy=False)) > 2**31 - 1:
        raise ValueError("token ids must be in 0..2**31-1")
    return array.astype(np.int32)


def as_float_array(values: ArrayLike) -> FloatArray:
    """Return a one-dimensional float32 array of the values."""
    array = np.asarray(values, np.float32)
    if array.ndim != 1:
        raise ValueError(f"values must be one-dimensional, got shape {array.shape}")
    return array
