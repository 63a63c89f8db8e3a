"""Weights in files on their way to an engine's processes, which map them: no process copies what it only passes on."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.protocols.weights import StoredWeight

if TYPE_CHECKING:
    from torch import Tensor

Place = tuple[str, str, list[int], str, int]
"""Name, torch dtype and shape of a weight, the path of its file, and its offset. Plain values cross process borders."""


def place_of(stored: StoredWeight) -> Place:
    """Return the place of a weight as plain values."""
    spec = stored.spec
    return spec.name, spec.dtype, list(spec.shape), stored.path, stored.offset


def map_weights(places: Iterable[Place]) -> Iterator[tuple[str, Tensor]]:
    """
    Yield weights as tensors over their files, without a copy. Writes to a tensor change no file.

    Args:
        places: as `place_of` returns them; weights of one file should follow each other.
    """
    import torch

    opened, memory = "", None
    for name, dtype_name, shape, path, offset in places:
        dtype, count = getattr(torch, dtype_name), math.prod(shape)
        if count == 0:  # a file without bytes cannot be mapped
            yield name, torch.empty(shape, dtype=dtype)
            continue
        if memory is None or path != opened:
            opened, memory = path, _map_file(path)
        yield name, torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


def _map_file(path: str) -> mmap.mmap:
    with Path(path).open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
