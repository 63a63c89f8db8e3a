"""New weights in SGLang's process: tensors over the memory that the engine has filled."""

from __future__ import annotations

import importlib
import mmap
import os
from pathlib import Path
from typing import Any

_SHARED_MEMORY = Path("/dev/shm")

Bucket = list[tuple[str, str, list[int], int, int]]
"""Name, torch's dtype, shape, offset and bytes of each weight."""


def map_file(path: str, size: int) -> mmap.mmap:
    """Return the memory of a file; writing to it would change a copy."""
    with Path(path).open("rb") as file:
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)


def tensors_of(memory: mmap.mmap, bucket: Bucket) -> list[tuple[str, Any]]:
    """Return named tensors, all over one storage: SGLang passes storages to its ranks, and each takes a copy."""
    torch = importlib.import_module("torch")
    start, end = _bounds(bucket)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=end - start, offset=start)
    return [
        (name, flat[offset - start : offset - start + num_bytes].view(getattr(torch, dtype)).view(shape))
        for name, dtype, shape, offset, num_bytes in bucket
    ]


def _bounds(bucket: Bucket) -> tuple[int, int]:
    *_, last_offset, last_bytes = bucket[-1]
    return bucket[0][3], last_offset + last_bytes


def check_shared_memory(buckets: list[Bucket]) -> None:
    """Raise `OSError` when a bucket does not fit into shared memory: torch would be killed while it copies."""
    needed = max((end - start for start, end in map(_bounds, buckets)), default=0)
    status = os.statvfs(_SHARED_MEMORY)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        raise OSError(
            f"{_SHARED_MEMORY} has {free} bytes left, and a bucket of weights needs {needed}:"
            " lower weight_bucket_bytes, or make it larger"
        )
