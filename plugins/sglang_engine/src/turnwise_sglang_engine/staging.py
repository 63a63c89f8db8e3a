"""
New weights on their way to SGLang's process: checked against the model's files, and copied to memory that it can map.

All weights are copied before any is loaded, so that a bad weight or a failing iterator changes nothing.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from turnwise.errors import EngineError
from turnwise.weights.sources import as_numpy
from turnwise_engine_support.error_lines import engine_errors
from turnwise_engine_support.weight_checks import ExpectedWeights, check_dtype

ALIGNMENT = 64


@frozen
class Entry:
    """
    The place of one weight in the memory file.

    Attributes:
        name: in the state dict.
        dtype: torch's name of it.
        shape: its shape.
        offset: of its first byte, a multiple of `ALIGNMENT`.
        num_bytes: its size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@define
class StagedWeights:
    """
    Weights in a memory file that another process can map, until `close`.

    Attributes:
        file: has no name, so that nothing stays behind if this process is killed.
        entries: the weights in the file.
        size: bytes of the file, with gaps.
    """

    file: io.FileIO
    entries: list[Entry] = field(factory=list)
    size: int = 0

    @property
    def names(self) -> set[str]:
        """The names of all weights in the file."""
        return {entry.name for entry in self.entries}

    @property
    def path(self) -> str:
        """The path by which another process of the same user opens the file."""
        return f"/proc/{os.getpid()}/fd/{self.file.fileno()}"

    def add(self, name: str, array: NDArray[Any]) -> None:
        """Copy one weight into the file."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        offset = -(-self.size // ALIGNMENT) * ALIGNMENT
        written = 0
        while written < len(data):
            written += os.pwrite(self.file.fileno(), data[written:], offset + written)
        self.entries.append(Entry(name, array.dtype.name, tuple(array.shape), offset, len(data)))
        self.size = offset + len(data)

    def buckets(self, max_bytes: int) -> list[list[Entry]]:
        """Split the weights, in order, into buckets of at most `max_bytes`; a larger weight is a bucket alone."""
        found: list[list[Entry]] = []
        for entry in self.entries:
            end = entry.offset + entry.num_bytes
            if found and end - found[-1][0].offset <= max_bytes:
                found[-1].append(entry)
            else:
                found.append([entry])
        return found

    def close(self) -> None:
        """Free the memory."""
        self.file.close()


def stage(
    weights: Iterable[tuple[str, object]],
    expected: ExpectedWeights,
    *,
    whole: bool,
    name_for_sglang: Callable[[str], str] = str,
) -> StagedWeights:
    """
    Check weights and copy them to a memory file. Blocks until all are copied.

    Args:
        weights: name and array or tensor of each; views that are valid only until the next one are fine.
        expected: the weights that the model has.
        whole: whether every weight of the model is needed.
        name_for_sglang: of a weight. SGLang ignores some names that it does not know.

    Raises:
        EngineError: an unknown name, a wrong shape or dtype, a duplicate or missing weight, no memory, or any error of
            the iterator.
    """
    # A source that describes its weights is refused before a byte is copied.
    for spec in getattr(weights, "specs", ()):
        check_dtype(spec.name, spec.dtype)
        expected.check(spec.name, spec.shape)
    staged = StagedWeights(io.FileIO(os.memfd_create("turnwise-weights", os.MFD_CLOEXEC), "w"))
    try:
        with engine_errors("cannot read the new weights"):
            _copy_all(staged, weights, expected, name_for_sglang)
        if whole:
            expected.check_complete(staged.names, whole=True)
    except BaseException:
        staged.close()
        raise
    return staged


def _copy_all(
    staged: StagedWeights,
    weights: Iterable[tuple[str, Any]],
    expected: ExpectedWeights,
    name_for_sglang: Callable[[str], str],
) -> None:
    names: set[str] = set()
    for name, weight in weights:
        if name in names:
            raise EngineError(f"weight {name!r} came twice")
        names.add(name)
        array = as_numpy(weight)
        check_dtype(name, array.dtype.name)
        expected.check(name, array.shape)
        if expected.is_loaded(name):
            staged.add(name_for_sglang(name), array)
