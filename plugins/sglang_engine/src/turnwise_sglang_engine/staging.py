"""
New weights on their way to SGLang's process: checked against the model's files, and copied where it can read them.

Everything is copied before anything is loaded, so that a bad weight, or an iterator that fails, changes nothing.
"""

from __future__ import annotations

import difflib
import importlib
import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from turnwise.errors import EngineError

DTYPES = frozenset({"bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"})
"""What weights may be of; the names are torch's and ml_dtypes' both."""
ALIGNMENT = 64
_TIED = "lm_head.weight"


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of each weight in a model's directory, from the headers of its safetensors alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


@frozen
class Expected:
    """
    What the model's weights are.

    Attributes:
        shapes: of every weight in the model's files; empty when they are in another format, and then nothing is
            checked.
        tied: the output layer is the input's table, so its own weight may come and is left out.
    """

    shapes: Mapping[str, tuple[int, ...]]
    tied: bool = False

    def wants(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether to load a weight; `EngineError` for a name or shape that the model has not."""
        if not self.shapes:
            return True
        loaded = not (self.tied and name == _TIED)
        name = name if loaded else self._table
        if name not in self.shapes:
            close = difflib.get_close_matches(name, self.shapes, n=1)
            raise EngineError(f"the model has no weight {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
        if shape != self.shapes[name]:
            raise EngineError(f"weight {name!r} has shape {self.shapes[name]}, got {shape}")
        return loaded

    @property
    def _table(self) -> str:
        """The input's table, which a tied output layer is."""
        return next((name for name in self.shapes if name.endswith("embed_tokens.weight")), _TIED)

    def check_whole(self, names: set[str]) -> None:
        """Raise `EngineError` unless every weight of the model is there."""
        needed = {name for name in self.shapes if not (self.tied and name == _TIED)}
        if missing := sorted(needed - names):
            raise EngineError(f"{len(missing)} weights are missing, such as {missing[0]!r}: the model holds none")


@frozen
class Entry:
    """
    Where one weight lies.

    Attributes:
        name: in the state dict.
        dtype: torch's name of it.
        shape: its axes.
        offset: of its first byte, a multiple of `ALIGNMENT`.
        num_bytes: its size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@define
class Staged:
    """
    Weights in memory that another process can map, until `close`.

    Attributes:
        file: without a name, so that nothing stays behind whatever happens.
        entries: what lies in it.
        size: of all, with gaps.
    """

    file: io.FileIO
    entries: list[Entry] = field(factory=list)
    size: int = 0

    @property
    def names(self) -> set[str]:
        """Of all weights in it."""
        return {entry.name for entry in self.entries}

    @property
    def path(self) -> str:
        """Where another process of the same user finds it."""
        return f"/proc/{os.getpid()}/fd/{self.file.fileno()}"

    def add(self, name: str, dtype: str, array: NDArray[np.generic]) -> None:
        """Copy one weight in."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        offset = -(-self.size // ALIGNMENT) * ALIGNMENT
        written = 0
        while written < len(data):
            written += os.pwrite(self.file.fileno(), data[written:], offset + written)
        self.entries.append(Entry(name, dtype, tuple(array.shape), offset, len(data)))
        self.size = offset + len(data)

    def buckets(self, max_bytes: int) -> list[list[Entry]]:
        """Return the weights in order, in runs of at most so many bytes; a larger weight is a run of its own."""
        runs: list[list[Entry]] = []
        for entry in self.entries:
            end = entry.offset + entry.num_bytes
            if runs and end - runs[-1][0].offset <= max_bytes:
                runs[-1].append(entry)
            else:
                runs.append([entry])
        return runs

    def close(self) -> None:
        """Let the memory go."""
        self.file.close()


def stage(weights: Iterable[tuple[str, Any]], expected: Expected, *, whole: bool) -> Staged:
    """
    Check weights and copy them. Blocks for as long as that takes.

    Args:
        weights: name and numbers of each; views that live only until the next one is taken are fine.
        expected: what the model's weights are.
        whole: every weight of the model is needed.

    Raises:
        EngineError: a name, shape or dtype that the model has not, a weight that came twice or is missing, an error of
            the iterator, or no memory.
    """
    _check_specs(weights, expected)
    staged = Staged(io.FileIO(os.memfd_create("turnwise-weights", os.MFD_CLOEXEC), "w"))
    try:
        _copy_all(staged, weights, expected)
        if whole:
            expected.check_whole(staged.names)
    except BaseException as error:
        staged.close()
        if isinstance(error, EngineError) or not isinstance(error, Exception):
            raise
        raise EngineError(f"the weights could not be read: {type(error).__name__}: {error}") from error
    return staged


def _check_specs(weights: Iterable[tuple[str, Any]], expected: Expected) -> None:
    """Refuse what a source says of itself before a byte is copied."""
    for spec in getattr(weights, "specs", ()):
        _checked_dtype(spec.name, spec.dtype)
        expected.wants(spec.name, tuple(spec.shape))


def _copy_all(staged: Staged, weights: Iterable[tuple[str, Any]], expected: Expected) -> None:
    names: set[str] = set()
    for name, weight in weights:
        if name in names:
            raise EngineError(f"weight {name!r} came twice")
        names.add(name)
        dtype, array, shape = as_bytes(name, weight)
        if expected.wants(name, shape):
            staged.add(name, dtype, array)


def as_bytes(name: str, weight: Any) -> tuple[str, NDArray[np.generic], tuple[int, ...]]:
    """Return torch's name of the dtype, an array with the same bits, and the shape of an array or torch tensor."""
    if hasattr(weight, "detach"):
        dtype = _checked_dtype(name, str(weight.dtype).removeprefix("torch."))
        tensor = weight.detach().cpu().contiguous()
        if dtype.startswith(("bfloat", "float8")):
            # numpy has none of these numbers: the bits are the same.
            torch = importlib.import_module("torch")
            tensor = tensor.view(torch.int16 if dtype == "bfloat16" else torch.int8)
        return dtype, tensor.numpy(), tuple(weight.shape)
    dtype = _checked_dtype(name, weight.dtype.name)
    return dtype, np.asarray(weight), tuple(weight.shape)


def _checked_dtype(name: str, dtype: str) -> str:
    if dtype not in DTYPES:
        raise EngineError(f"weight {name!r} must be of floating point, got {dtype}")
    return dtype
