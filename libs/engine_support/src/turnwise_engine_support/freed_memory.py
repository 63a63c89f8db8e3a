"""Memory that this process holds and does not need: freed by its allocators, or a copy of what a file has."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

_SMAPS: Final = Path("/proc/self/smaps")


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
    read stays resident, also where the tensor has another memory by now. A mapping with a page that was written is left
    as it is, because the file lacks what was written.

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
    try:
        lines = _SMAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # a container without this file
        return
    place, written = None, 0
    for line in lines:
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):  # such as `7f01-7f02 rw-p 00000000 08:01 42 /model.safetensors`
            if place is not None and not written:
                yield place
            access, _offset, _device, inode = rest.split()[:4]
            start, _, end = name.partition("-")
            place = (int(start, 16), int(end, 16)) if access.endswith("p") and inode != "0" else None
            written = 0
        elif name in ("Anonymous:", "Swap:"):  # a written page may have left memory since
            written += int(rest.split()[0])
    if place is not None and not written:
        yield place
