"""Memory that this process holds and does not need: freed by its allocators, or a copy of what a file has."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import psutil


def return_freed_memory() -> None:
    """Return it to the devices and to the system, where another part of the run may need it. Takes milliseconds."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
        if trim is not None:
            trim(0)


def release_file_pages(tensors: Iterable[Any]) -> int:
    """
    Take the pages of weights that are mapped from a file out of memory; their next use reads the file again.

    `from_pretrained` maps safetensors: a tensor on a CPU is a view of the file until it is written, and a page that was
    read stays resident, even if the tensor has been copied since. A mapping with a written page keeps all its pages,
    because the file does not have the new values.

    Args:
        tensors: of torch, which no other thread writes meanwhile; those elsewhere than on the host do not count.

    Returns:
        The bytes of the mappings whose pages were released.
    """
    if sys.platform != "linux":
        return 0
    places = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.device.type == "cpu"}
    advise = ctypes.CDLL(None, use_errno=True).madvise
    released = 0
    for start, end in _unwritten_mappings():
        if any(start <= place < end for place in places):
            failed = advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(mmap.MADV_DONTNEED))
            released += 0 if failed else end - start
    return released


def _unwritten_mappings() -> Iterator[tuple[int, int]]:
    """Yield start and end of each private mapping of a file of which no page was written."""
    process = psutil.Process()
    if not hasattr(process, "memory_maps"):  # a container without /proc/PID/smaps
        return
    for each in process.memory_maps(grouped=False):
        # Names in brackets are no files; a written page may have left memory since.
        if each.perms.endswith("p") and each.path.startswith("/") and not each.anonymous and not each.swap:
            start, _, end = each.addr.partition("-")
            yield int(start, 16), int(end, 16)
