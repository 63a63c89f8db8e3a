"""
New weights on their way to vLLM's processes: checked against the model's files, then written where all can read them.

vLLM's remote calls to its workers carry no tensors, so the workers map files. Weights that a transport has received in
files stay there. Others are written to files, in shared memory if there is any. These have no names, so the system
frees them even if this process is killed. The model is not changed here.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
from attrs import define, field

from turnwise.errors import EngineError
from turnwise.weights.sources import as_numpy
from turnwise_engine_support.error_lines import engine_errors
from turnwise_engine_support.machine import SHARED_MEMORY
from turnwise_engine_support.stored_weights import Place, place_of
from turnwise_engine_support.weight_checks import ExpectedWeights, check_dtype

ALIGNMENT = 64


@define
class StagedWeights:
    """
    Weights in files, ready for vLLM's processes on this host, until `close`.

    Attributes:
        folder: the folder on whose file system new files are.
        bucket_bytes: most bytes of a file; a larger weight has a file alone.
        places: of all weights that vLLM loads, in order.
        files: the files that were written here.
        num_bytes: size of all weights.
    """

    folder: Path
    bucket_bytes: int
    places: list[Place] = field(factory=list)
    files: list[IO[bytes]] = field(factory=list)
    num_bytes: int = 0
    _size: int = 0

    @property
    def names(self) -> set[str]:
        """The names of all weights."""
        return {name for name, *_ in self.places}

    @property
    def paths(self) -> list[Path]:
        """The paths by which other processes of the same user open the written files, in order."""
        return [self._path(file) for file in self.files]

    def close(self) -> None:
        """Free the written files."""
        for file in self.files:
            file.close()

    def write(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """Write one weight; `EngineError` if there is no room."""
        # Only an array with strides is copied in memory, too.
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        try:
            offset = -(-self._size // ALIGNMENT) * ALIGNMENT
            if not self.files or (self._size and offset + len(data) > self.bucket_bytes):
                self.files.append(tempfile.TemporaryFile(dir=self.folder, buffering=0))  # noqa: SIM115 - `close` closes
                offset = 0
            written = 0
            while written < len(data):
                written += os.pwrite(self.files[-1].fileno(), data[written:], offset + written)
        except OSError as error:
            raise EngineError(
                f"cannot write {array.nbytes} bytes of new weights to {str(self.folder)!r}: {error}"
            ) from error
        self._size = offset + len(data)
        self.add((name, array.dtype.name, list(array.shape), str(self._path(self.files[-1])), offset), len(data))

    def add(self, place: Place, num_bytes: int) -> None:
        """Add a weight that is in a file."""
        self.places.append(place)
        self.num_bytes += num_bytes

    def _path(self, file: IO[bytes]) -> Path:
        return Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


def stage(
    weights: Iterable[tuple[str, object]],
    expected: ExpectedWeights,
    *,
    weight_dir: Path | None,
    bucket_bytes: int,
    whole: bool,
) -> StagedWeights:
    """
    Check weights and write those to files that are in none. The caller closes the files. Blocks until all are written.

    Args:
        weights: name and array or tensor of each; views that are valid only until the next one are fine.
        expected: the weights that the model has.
        weight_dir: folder to write to; None is shared memory, or the folder for temporary files.
        bucket_bytes: largest file; a single larger weight gets a file for itself.
        whole: whether every weight of the model is needed.

    Raises:
        EngineError: an unknown name, a wrong shape or dtype, a duplicate or missing weight, no room, or any error of
            the iterator.
    """
    shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    staged = StagedWeights(weight_dir or shared, bucket_bytes)
    try:
        with engine_errors("cannot read the new weights"):
            _stage_all(staged, weights, expected)
        expected.check_complete(staged.names, whole=whole)
    except BaseException:
        staged.close()
        raise
    return staged


def _stage_all(staged: StagedWeights, weights: Iterable[tuple[str, Any]], expected: ExpectedWeights) -> None:
    names: set[str] = set()
    stored = {each.spec.name: each for each in getattr(weights, "stored", ())}
    for name, weight in weights:
        array = as_numpy(weight)
        check_dtype(name, array.dtype.name)
        expected.check(name, array.shape)
        if name in names:
            raise EngineError(f"weight {name!r} came twice")
        names.add(name)
        if not expected.is_loaded(name):
            continue
        if name in stored:
            staged.add(place_of(stored[name]), array.nbytes)
        else:
            staged.write(name, array)
