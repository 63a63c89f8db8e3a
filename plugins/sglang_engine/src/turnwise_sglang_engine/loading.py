"""New weights in SGLang's process: tensors over the memory file that the engine has filled."""

from __future__ import annotations

import mmap
import pickle
from pathlib import Path
from typing import Any

from turnwise_engine_support.machine import SHARED_MEMORY, shared_memory

Bucket = list[tuple[str, str, list[int], int, int]]
"""Name, torch dtype, shape, offset and size in bytes of each weight."""


def map_file(path: str, size: int) -> mmap.mmap:
    """Map a file into memory. Writes go to a private copy."""
    with Path(path).open("rb") as file:
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)


def make_tensors(memory: mmap.mmap, bucket: Bucket) -> list[tuple[str, Any]]:
    """Return named tensors over one storage: SGLang sends storages to its ranks, and each rank copies them."""
    import torch

    start, end = _bounds(bucket)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=end - start, offset=start)
    return [
        (name, flat[offset - start : offset - start + num_bytes].view(getattr(torch, dtype)).view(shape))
        for name, dtype, shape, offset, num_bytes in bucket
    ]


def pickle_tensors(tensors: list[tuple[str, Any]]) -> bytes:
    """Return the tensors as bytes that a process on any node can read."""
    # Clones: a pickled view contains the whole storage.
    return pickle.dumps([(name, tensor.clone()) for name, tensor in tensors])


def _bounds(bucket: Bucket) -> tuple[int, int]:
    *_, last_offset, last_bytes = bucket[-1]
    return bucket[0][3], last_offset + last_bytes


def check_shared_memory(buckets: list[Bucket]) -> None:
    """Raise `OSError` if a bucket does not fit into shared memory: torch would be killed while it copies."""
    needed = max((end - start for start, end in map(_bounds, buckets)), default=0)
    sizes = shared_memory()
    free = 0 if sizes is None else sizes[1]
    if needed > free:
        raise OSError(
            f"{SHARED_MEMORY} has {free} bytes free, but a bucket of weights needs {needed}:"
            " lower weight_bucket_bytes, or enlarge it"
        )
