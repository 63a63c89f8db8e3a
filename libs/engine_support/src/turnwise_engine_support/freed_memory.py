"""Memory that is free, but that the allocators of this process keep."""

from __future__ import annotations

import ctypes
import gc
import sys


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
