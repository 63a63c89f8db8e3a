"""
New weights on their way to vLLM's processes: checked against the model's files, then written where all can read them.

vLLM's remote calls to its workers carry no tensors, so a bucket of weights is a safetensors file, in shared memory if
there is any. The files have no names, so the system frees them even if this process is killed. The model is not changed
here.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from attrs import define, field

from turnwise.errors import EngineError
from turnwise.weights.sources import as_numpy
from turnwise_engine_support.error_lines import engine_errors
from turnwise_engine_support.machine import SHARED_MEMORY
from turnwise_engine_support.weight_checks import ExpectedWeights, check_dtype


@define
class StagedWeights:
    """
    Weights in files, ready for vLLM's processes on this host, until `close`.

    Attributes:
        folder: the folder on whose file system the files are.
        files: the files, in order.
        names: of all weights in the files.
        num_bytes: size of all weights.
    """

    folder: Path
    files: list[IO[bytes]] = field(factory=list)
    names: set[str] = field(factory=set)
    num_bytes: int = 0

    @property
    def paths(self) -> list[Path]:
        """The paths by which other processes of the same user open the files, in order."""
        return [Path(f"/proc/{os.getpid()}/fd/{file.fileno()}") for file in self.files]

    def close(self) -> None:
        """Free the files."""
        for file in self.files:
            with suppress(OSError):  # what did not fit is written again
                file.close()

    def write_bucket(self, bucket: dict[str, np.ndarray[Any, Any]]) -> None:
        """Write one file; `EngineError` if there is no room."""
        from safetensors import SafetensorError
        from safetensors.numpy import save

        try:
            self.files.append(tempfile.TemporaryFile(dir=self.folder))  # noqa: SIM115 - `close` closes it
            self.files[-1].write(save(bucket))  # `save_file` would write a file with a name, and rename it
            self.files[-1].flush()
        except (OSError, SafetensorError) as error:
            size = sum(array.nbytes for array in bucket.values())
            raise EngineError(f"cannot write {size} bytes of new weights to {str(self.folder)!r}: {error}") from error


def stage(
    weights: Iterable[tuple[str, Any]],
    expected: ExpectedWeights,
    *,
    weight_dir: Path | None,
    bucket_bytes: int,
    whole: bool,
) -> StagedWeights:
    """
    Check weights and write them to files. The caller closes the files. Blocks until all are written.

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
    staged = StagedWeights(weight_dir or shared)
    try:
        with engine_errors("cannot read the new weights"):
            _write_all(staged, weights, expected, bucket_bytes)
        expected.check_complete(staged.names, whole=whole)
    except BaseException:
        staged.close()
        raise
    return staged


def _write_all(
    staged: StagedWeights, weights: Iterable[tuple[str, Any]], expected: ExpectedWeights, bucket_bytes: int
) -> None:
    bucket: dict[str, np.ndarray[Any, Any]] = {}
    size = 0
    for name, weight in weights:
        array = as_numpy(weight)
        check_dtype(name, array.dtype.name)
        expected.check(name, array.shape)
        if not expected.is_loaded(name):
            continue
        if name in staged.names:
            raise EngineError(f"weight {name!r} came twice")
        staged.names.add(name)
        staged.num_bytes += array.nbytes
        if bucket and size + array.nbytes > bucket_bytes:
            staged.write_bucket(bucket)
            bucket, size = {}, 0
        # A copy, because the source may reuse the buffer for the next weight.
        bucket[name] = np.array(array, order="C")
        size += array.nbytes
    if bucket:
        staged.write_bucket(bucket)
