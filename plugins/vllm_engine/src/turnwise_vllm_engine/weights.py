"""
New weights on their way to vLLM's processes: checked against the model's files, and written where all of them can read.

vLLM's calls to its workers carry no tensors, so a bucket of weights is a file in the safetensors format, in shared
memory when there is some. Nothing here changes the model.
"""

from __future__ import annotations

import difflib
import importlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field, frozen

from turnwise.errors import EngineError

_SHARED_MEMORY = Path("/dev/shm")
_FORMATS = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""What safetensors calls the dtypes of weights."""

Shapes = Mapping[str, tuple[int, ...]]
_Bucket = dict[str, tuple[str, np.ndarray[Any, Any]]]


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """
    Return name and shape of each weight in a model's directory; nothing when it has no safetensors.

    Only the headers are read.
    """
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
        shapes: of every weight in the model's files; empty when they could not be read.
        fused: for each layer that vLLM makes of several, the names that they have in the files, such as
            `q_proj`, `k_proj` and `v_proj`.
        tied: the output layer is the input's table, so `lm_head.weight` may come and is not needed.
    """

    shapes: Shapes
    fused: Sequence[Sequence[str]] = ()
    tied: bool = False

    def is_tied(self, name: str) -> bool:
        """Return whether a weight comes twice in the model's state dict and once in its files and in vLLM."""
        return self.tied and name == "lm_head.weight" and name not in self.shapes

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise `EngineError` for a name or shape that the model has not."""
        if not self.shapes:
            return
        if self.is_tied(name):
            name = next((other for other in self.shapes if other.endswith("embed_tokens.weight")), name)
        if name not in self.shapes:
            close = difflib.get_close_matches(name, self.shapes, n=1)
            raise EngineError(f"the model has no weight {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
        if shape != self.shapes[name]:
            raise EngineError(f"weight {name!r} has shape {self.shapes[name]}, got {shape}")

    def check_together(self, names: set[str], *, whole: bool) -> None:
        """
        Raise `EngineError` when a weight is missing without which others cannot be replaced.

        Args:
            names: of all that came.
            whole: every weight is needed, because the model holds none that can be kept.
        """
        if not names and not whole:
            return
        needed = set(self.shapes) if whole else {each for name in names for each in self._siblings(name)}
        if missing := sorted(needed.intersection(self.shapes) - names):
            why = "the model holds none" if whole else "vLLM makes one layer of it and others that came"
            raise EngineError(f"{len(missing)} weights are missing, such as {missing[0]!r}: {why}")

    def _siblings(self, name: str) -> Iterator[str]:
        """Yield the names of weights that vLLM replaces with this one or not at all."""
        if ".experts." in name:
            stem = name.partition(".experts.")[0] + ".experts."
            yield from (other for other in self.shapes if other.startswith(stem))
            return
        module, _, kind = name.rpartition(".")
        parent, _, layer = module.rpartition(".")
        for group in self.fused:
            if layer in group:
                yield from (f"{parent}.{sibling}.{kind}" for sibling in group)


@define
class Staged:
    """
    Weights that wait for vLLM's processes.

    Attributes:
        folder: holds them, and nothing else.
        paths: of the files, in order.
        names: of all weights in them.
        num_bytes: of these.
    """

    folder: Path
    paths: list[Path] = field(factory=list)
    names: set[str] = field(factory=set)
    num_bytes: int = 0

    def remove(self) -> None:
        """Take the files away."""
        shutil.rmtree(self.folder, ignore_errors=True)


def stage(
    weights: Iterable[tuple[str, Any]], expected: Expected, *, weight_dir: Path | None, bucket_bytes: int, whole: bool
) -> Staged:
    """
    Check weights and write them down; `Staged.remove` takes them away again. Blocks for as long as that takes.

    Args:
        weights: name and numbers of each; views that live only until the next one is taken are fine.
        expected: what the model's weights are.
        weight_dir: where to write; None is shared memory, or the folder for temporary files.
        bucket_bytes: most bytes of one file, but for a single weight that is larger.
        whole: every weight of the model is needed.

    Raises:
        EngineError: a name, shape or dtype that the model has not, something is missing, or the source of the weights
            broke off; see `Expected`.
    """
    root = weight_dir or (_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None)
    try:
        result = Staged(Path(tempfile.mkdtemp(prefix="turnwise-weights-", dir=root)))
    except OSError as error:
        raise EngineError(f"cannot write new weights to {str(root)!r}: {error}") from error
    try:
        _write_all(result, weights, expected, bucket_bytes)
        expected.check_together(result.names, whole=whole)
    except BaseException as error:
        result.remove()
        if isinstance(error, Exception) and not isinstance(error, EngineError):
            raise EngineError(f"the new weights broke off: {type(error).__name__}: {error}") from error
        raise
    return result


def _write_all(result: Staged, weights: Iterable[tuple[str, Any]], expected: Expected, bucket_bytes: int) -> None:
    bucket: _Bucket = {}
    size = 0
    for name, weight in weights:
        array, dtype = as_array(name, weight)
        expected.check(name, array.shape)
        if expected.is_tied(name):
            continue
        if name in result.names:
            raise EngineError(f"weight {name!r} came twice")
        result.names.add(name)
        result.num_bytes += array.nbytes
        if bucket and size + array.nbytes > bucket_bytes:
            _write(result, bucket)
            bucket, size = {}, 0
        # A copy: what comes may be a view that lives only until the next one is taken.
        bucket[name] = (dtype, np.array(array, order="C"))
        size += array.nbytes
    if bucket:
        _write(result, bucket)


def as_array(name: str, weight: Any) -> tuple[np.ndarray[Any, Any], str]:
    """Return the numbers of a numpy array or torch tensor, bytes where numpy knows no such number, and the dtype."""
    if hasattr(weight, "detach"):
        return _from_torch(name, weight)
    array = np.asarray(weight)
    return array, _format(name, array.dtype.name)


def _from_torch(name: str, tensor: Any) -> tuple[np.ndarray[Any, Any], str]:
    dtype = _format(name, str(tensor.dtype).removeprefix("torch."))
    tensor = tensor.detach().cpu().contiguous()
    if dtype in ("BF16", "F8_E4M3", "F8_E5M2"):
        # numpy has none of these numbers: the bits are the same.
        torch = importlib.import_module("torch")
        tensor = tensor.view(torch.int16 if dtype == "BF16" else torch.int8)
    return tensor.numpy(), dtype


def _format(name: str, dtype: str) -> str:
    if dtype not in _FORMATS:
        raise EngineError(f"weight {name!r} must be of floating point, got {dtype}")
    return _FORMATS[dtype]


def _write(result: Staged, bucket: _Bucket) -> None:
    """Write one file: the length of the header, the header, and the numbers."""
    header, offset = {}, 0
    for name, (dtype, array) in bucket.items():
        end = offset + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = result.folder / f"{len(result.paths)}.safetensors"
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, array in bucket.values():
                file.write(array.reshape(-1).view(np.uint8).data)
    except OSError as error:
        raise EngineError(f"cannot write {offset} bytes of new weights to {str(path.parent)!r}: {error}") from error
    result.paths.append(path)
