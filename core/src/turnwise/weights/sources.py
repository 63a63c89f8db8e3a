"""
Sources of weights: torch modules, mappings and safetensors files, and their conversion for an engine.

Each is a `turnwise.protocols.weights.WeightSource`. They yield torch tensors unchanged; `as_numpy` converts them where
an array is needed. This module never imports torch.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

import numpy as np
from attrs import define, field, frozen

from turnwise.errors import EngineError
from turnwise.protocols.weights import TensorSpec, Weight, WeightArray, WeightSource, dtype_of

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

_INDEX = "model.safetensors.index.json"
_FLOATS = ("float", "bfloat")


@runtime_checkable
class Module(Protocol):
    """A torch module, or an object with such a state dict."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the weights by name."""


Weights = WeightSource | Module | Mapping[str, WeightArray] | str | Path | Iterable[Weight]
"""Weights in any form that `source_of` accepts."""


def source_of(weights: Weights) -> WeightSource:
    """
    Return a source of weights.

    Args:
        weights: a source, a torch module, a mapping of names to arrays, the path of a safetensors file or of a folder
            of them, or an iterable of (name, array) pairs. An iterable is read completely, because all shapes must be
            known before the first weight is sent.
    """
    if isinstance(weights, WeightSource):
        return weights
    if isinstance(weights, Module):
        return module_source(weights)
    if isinstance(weights, Mapping):
        return PairsSource(tuple(weights.items()))
    if isinstance(weights, str | Path):
        return SafetensorsSource(Path(weights))
    return PairsSource(tuple(weights))


def module_source(module: Module) -> PairsSource:
    """
    Return the floating point weights of a module's state dict, with the values that they have when they are read.

    Tied weights appear once, under the first of their names, as in a saved model. A sharded tensor is gathered when it
    is read, and every rank of its mesh must read it.
    """
    seen: set[tuple[int, tuple[int, ...]]] = set()
    pairs = []
    for name, tensor in module.state_dict().items():
        # With the shape, because a view of the first rows has the same address. Meta and sharded tensors have no
        # address.
        key = (_data_ptr(tensor), tuple(tensor.shape))
        if _dtype_name(tensor).startswith(_FLOATS) and (key[0] == 0 or key not in seen):
            seen.add(key)
            pairs.append((name, tensor))
    return PairsSource(tuple(pairs))


@frozen(eq=False)
class PairsSource:
    """Weights in memory, as (name, array or tensor) pairs."""

    pairs: Sequence[Weight]

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name, tuple(array.shape), _dtype_name(array)) for name, array in self.pairs)

    def __iter__(self) -> Iterator[Weight]:
        for name, array in self.pairs:
            gather = getattr(array, "full_tensor", None)
            yield name, array if gather is None else gather()


@define(eq=False)
class CopiedSource:
    """A source whose weights are copied to host memory as they are read; the reader gets them as they were."""

    source: WeightSource
    _copies: dict[str, np.ndarray] = field(factory=dict, init=False)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return self.source.specs

    def __iter__(self) -> Iterator[Weight]:
        for name, array in self.source:
            self._copies[name] = as_numpy(array, copy=True)
            yield name, array

    def copy(self) -> PairsSource:
        """Return all weights in host memory; reads the weights that no reader has read."""
        if len(self._copies) < len(self.specs):
            self._copies = {name: as_numpy(array, copy=True) for name, array in self.source}
        return PairsSource(tuple(self._copies.items()))


@define(eq=False)
class SafetensorsSource:
    """Weights of a safetensors file, or of all such files in a model's folder; `EngineError` if there are none."""

    path: Path
    _files: tuple[Path, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._files = tuple(_safetensors_files(self.path))
        if not self._files:
            raise EngineError(f"{str(self.path)!r} contains no safetensors file")

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for file in self._files for spec in _read_specs(file))

    def __iter__(self) -> Iterator[Weight]:
        from safetensors import safe_open

        for file in self._files:
            with safe_open(file, framework="np") as opened:
                for spec in _read_specs(file):
                    yield spec.name, opened.get_tensor(spec.name)


def _safetensors_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / _INDEX
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        # An index has an entry for each weight, so it names every file many times.
        return [path / name for name in dict.fromkeys(names)]
    return sorted(path.glob("*.safetensors"))


_SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _read_specs(file: Path) -> Iterator[TensorSpec]:
    """Read the header of a file, and yield the specs of its floating point weights."""
    from safetensors import safe_open

    with safe_open(file, framework="np") as opened:
        for name in opened.keys():  # noqa: SIM118 - it is not a mapping
            header = opened.get_slice(name)
            dtype = _SAFETENSORS_DTYPES.get(header.get_dtype())
            if dtype is not None:
                yield TensorSpec(name, tuple(header.get_shape()), dtype)


@frozen(eq=False, kw_only=True)
class ConvertedSource:
    """
    A source whose weights are renamed, cast and fused for an engine.

    Attributes:
        source: the original weights.
        dtype: to cast to; None keeps the dtype.
        rename: regular expressions and their replacements in names, applied in order.
        fuse: names of fused weights, each with the names of its parts after `rename`. Parts are concatenated along the
            first axis.
    """

    source: WeightSource
    dtype: str | None = None
    rename: Mapping[str, str] = field(factory=dict)
    fuse: Mapping[str, Sequence[str]] = field(factory=dict)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every converted weight; `EngineError` if a part of a fused weight is missing."""
        renamed = (
            TensorSpec(self._name(spec.name), spec.shape, self.dtype or spec.dtype) for spec in self.source.specs
        )
        return tuple(spec for _name, spec in self._fuse(((spec.name, spec) for spec in renamed), _fuse_specs))

    def __iter__(self) -> Iterator[Weight]:
        """Yield each converted weight, as a numpy array if it was cast or fused."""
        renamed = ((self._name(name), self._cast(array)) for name, array in self.source)
        yield from self._fuse(renamed, lambda _name, parts: np.concatenate([as_numpy(part) for part in parts]))

    def _name(self, name: str) -> str:
        for pattern, replacement in self.rename.items():
            name = re.sub(pattern, replacement, name)
        return name

    def _cast(self, array: WeightArray) -> WeightArray:
        if self.dtype is None or _dtype_name(array) == self.dtype:
            return array
        return as_numpy(array).astype(dtype_of(self.dtype))

    def _fuse(self, pairs: Iterable[tuple[str, T]], join: Callable[[str, list[T]], T]) -> Iterator[tuple[str, T]]:
        """Yield pairs, with the parts of each fused weight joined as soon as all of them have been read."""
        whole_of = {part: whole for whole, parts in self.fuse.items() for part in parts}
        held: dict[str, dict[str, T]] = {}
        for name, value in pairs:
            if (whole := whole_of.get(name)) is None:
                yield name, value
                continue
            parts = held.setdefault(whole, {})
            parts[name] = value
            # Parts may come in any order. Each fused weight is yielded with its last part, to hold few of them at once.
            if len(parts) == len(self.fuse[whole]):
                del held[whole]
                yield whole, join(whole, [parts[part] for part in self.fuse[whole]])
        for whole, parts in held.items():
            missing = [part for part in self.fuse[whole] if part not in parts]
            raise EngineError(f"weights.fuse: cannot build {whole!r}: there is no weight {missing[0]!r}")


def _fuse_specs(name: str, parts: list[TensorSpec]) -> TensorSpec:
    rows = sum(part.shape[0] for part in parts)
    return TensorSpec(name, (rows, *parts[0].shape[1:]), parts[0].dtype)


def as_numpy(array: WeightArray, *, copy: bool = False) -> np.ndarray:
    """
    Return an array or tensor as a numpy array in host memory, without a copy if possible, or with exactly one.

    bfloat16 and float8 tensors become arrays of the types of `ml_dtypes`, because numpy has no such types.
    """
    if not hasattr(array, "detach"):
        return np.array(array) if copy else array
    tensor = array.detach().to("cpu", copy=copy).contiguous()
    name = _dtype_name(tensor)
    if not name.startswith(("bfloat", "float8")):
        return tensor.numpy()
    # torch converts no such tensor to numpy, so its bits pass as integers of the same size. The tensor exists, so torch
    # has been imported.
    torch = sys.modules["torch"]
    return tensor.view(torch.int16 if name == "bfloat16" else torch.int8).numpy().view(dtype_of(name))


def as_tensor(array: WeightArray, torch: ModuleType) -> Tensor:
    """Return a weight as a tensor of the imported module torch; a numpy array is copied."""
    if not isinstance(array, np.ndarray):
        return array
    name = array.dtype.name
    # torch does not know the types of ml_dtypes, so their bits pass as integers of the same size.
    passes_as_bits = name.startswith(("bfloat", "float8"))
    bits = array.view(np.int16 if name == "bfloat16" else np.int8) if passes_as_bits else array
    tensor: Tensor = torch.tensor(bits)
    return tensor.view(getattr(torch, name)) if passes_as_bits else tensor


def _dtype_name(array: WeightArray) -> str:
    return str(array.dtype).removeprefix("torch.")


def _data_ptr(tensor: Tensor) -> int:
    pointer = getattr(tensor, "data_ptr", None)
    return int(pointer()) if pointer is not None and not hasattr(tensor, "full_tensor") else 0
