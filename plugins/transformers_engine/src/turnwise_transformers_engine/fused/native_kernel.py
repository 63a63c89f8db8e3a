"""
The operators of the fused forward pass in C, for CPUs.

With few tokens, torch spends most of a decoding step in the dispatch of small operators, and in an attention that is
made for many queries a row. The system's compiler builds the C file once, in less than a second, and the cache folder
keeps it. Without a compiler, torch's operators are used.
"""

# ruff: noqa: TID253 - imported after the engine has loaded torch

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from turnwise_transformers_engine.fused.operators import AttendRows, Rotary
from turnwise_transformers_engine.fused.slab import Slab

# Sums may be reordered, so that they can be vectorised. `-ffast-math` would also link code that makes the process flush
# subnormal numbers to zero.
_REORDER = ("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno", "-ffinite-math-only")
_FLAGS = ("-O3", "-march=native", *_REORDER, "-shared", "-fPIC")
_COMPILE_S = 60
_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, list[Any]] = {
    "turnwise_norm": [_POINTER] * 3 + [_SIZE] * 2 + [_FLOAT],
    "turnwise_gate": [_POINTER] * 2 + [_SIZE] * 2,
    "turnwise_rotate": [_POINTER] * 5 + [_SIZE] * 4 + [_FLOAT],
    "turnwise_attend": [_POINTER] * 5 + [_SIZE] * 5 + [_FLOAT],
}


@define(eq=False)
class NativeOperators:
    """
    See `Operators`; every tensor is contiguous float32 on the CPU.

    Attributes:
        library: the compiled file.
        num_threads: threads that share the rows of an attention.
    """

    library: Any
    num_threads: int
    _pool: ThreadPoolExecutor | None = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.num_threads, "attention") if self.num_threads > 1 else None

    def norm(self, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        out = torch.empty_like(states)
        self.library.turnwise_norm(states.data_ptr(), weight.data_ptr(), out.data_ptr(), *states.shape, epsilon)
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        num_tokens, width = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(num_tokens, width)
        self.library.turnwise_gate(gate_up.data_ptr(), out.data_ptr(), num_tokens, width)
        return out

    def make_rotate(self, rotary: Rotary, positions: Tensor) -> Callable[[Tensor, Tensor | None, float], None]:
        pointers = rotary.cosine.data_ptr(), rotary.sine.data_ptr(), positions.data_ptr()

        def rotate(keyed: Tensor, weight: Tensor | None, epsilon: float) -> None:
            num_tokens, num_keyed, depth = keyed.shape
            weights = None if weight is None else weight.data_ptr()
            sizes = num_tokens, keyed.stride(0) // depth, num_keyed, depth
            self.library.turnwise_rotate(keyed.data_ptr(), weights, *pointers, *sizes, epsilon)

        return rotate

    def make_attend(self, slab: Slab, positions: Tensor, length: int, num_heads: int) -> AttendRows:
        num_rows, (capacity, groups, depth) = len(positions), slab.data.shape[3:]
        sizes = (capacity, num_heads, groups, depth, depth**-0.5)
        num_parts = self.num_threads if num_rows >= self.num_threads else 1
        bounds = [num_rows * part // num_parts for part in range(num_parts + 1)]
        scores = torch.empty(num_parts, num_heads * length)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            data, out = slab.data[layer], qkv.new_empty(num_rows, num_heads * depth)

            def run(part: int) -> None:
                start, end = bounds[part : part + 2]
                pointers = [each[start:].data_ptr() for each in (qkv, data, out, positions)]
                self.library.turnwise_attend(*pointers, scores[part].data_ptr(), end - start, *sizes)

            if self._pool is None or num_parts == 1:
                run(0)
            else:
                list(self._pool.map(run, range(num_parts)))
            return out

        return attend


def load_operators() -> NativeOperators | str:
    """Return the operators, compiled if the cache folder lacks them, or the reason why there are none."""
    compiler = os.environ.get("CC") or shutil.which("cc")
    if not compiler:
        return "there is no C compiler"
    try:
        library = ctypes.CDLL(str(_compiled(compiler)))
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return f"{compiler} failed: {lines[-1] if lines else error.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return NativeOperators(library, torch.get_num_threads())


def _compiled(compiler: str) -> Path:
    """Return the path of the library, and compile it first if the cache folder lacks it."""
    source = files(__package__) / "native_kernel.c"
    # Home folders are shared by machines with different processors, and `-march=native` is for one kind.
    key = "\0".join([source.read_text(encoding="utf-8"), compiler, *_FLAGS, platform.machine(), _processor_flags()])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnwise"
    path = folder / f"kernel-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    if not path.is_file():
        # Code is loaded from here, so only its owner may write to it.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            built = Path(own) / "kernel.so"
            command = [compiler, *_FLAGS, "-x", "c", "-", "-o", str(built)]
            subprocess.run(command, input=source.read_bytes(), check=True, capture_output=True, timeout=_COMPILE_S)
            # Replaced in one step: another process may load it at the same time.
            built.replace(path)
    return path


def _processor_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
