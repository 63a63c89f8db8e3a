"""
Where weights come from: a module of torch, a mapping, a folder of safetensors files; and what is done on the way.

Each is a `turnwise.weights.WeightSource`. Tensors of torch are passed on as they are until someone needs them as numpy
arrays; torch itself is never imported here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field, frozen

from turnwise.errors import EngineError
from turnwise.weights import TensorSpec, Weight, WeightSource, dtype_of

_INDEX = "model.safetensors.index.json"
_FLOATS = ("float", "bfloat")


def source_of(weights: Any) -> WeightSource:
    """
    Return a source of anything that holds weights.

    Args:
        weights: a source, a module of torch, a mapping of names to arrays, the path of a safetensors file or of a
            folder of them, or an iterable of (name, array) pairs. The pairs of an iterable are kept until they are
            sent, so that their shapes are known first.
    """
    if isinstance(weights, WeightSource):
        return weights
    if hasattr(weights, "state_dict"):
        return module_source(weights)
    if isinstance(weights, Mapping):
        return PairsSource(tuple(weights.items()))
    if isinstance(weights, str | Path):
        return SafetensorsSource(Path(weights))
    return PairsSource(tuple(weights))


def module_source(module: Any) -> PairsSource:
    """
    Return the floating point weights of a module's state dict, live: what is read is what they are then.

    Tied weights come once, under the first of their names, as in a saved model. A sharded tensor is gathered when it is
    read, which every rank of its mesh has to do.
    """
    seen: set[tuple[int, tuple[int, ...]]] = set()
    pairs = []
    for name, tensor in module.state_dict().items():
        key = (_data_ptr(tensor), tuple(tensor.shape))
        if _dtype_name(tensor).startswith(_FLOATS) and (key[0] == 0 or key not in seen):
            seen.add(key)
            pairs.append((name, tensor))
    return PairsSource(tuple(pairs))


@frozen(eq=False)
class PairsSource:
    """Weights that are in memory, as (name, array or tensor) pairs."""

    pairs: Sequence[Weight]

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every weight, in order."""
        return tuple(TensorSpec(name, tuple(array.shape), _dtype_name(array)) for name, array in self.pairs)

    def __iter__(self) -> Iterator[Weight]:
        """Yield each weight."""
        for name, array in self.pairs:
            gather = getattr(array, "full_tensor", None)
            yield name, array if gather is None else gather()


@define(eq=False)
class SafetensorsSource:
    """Weights of a safetensors file, or of the files of a model's folder; `EngineError` when there are none."""

    path: Path
    _files: tuple[Path, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Find the files."""
        self._files = tuple(_safetensors_files(self.path))
        if not self._files:
            raise EngineError(f"{str(self.path)!r} holds no safetensors file")

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every weight, file by file."""
        return tuple(spec for file in self._files for spec in _header(file))

    def __iter__(self) -> Iterator[Weight]:
        """Read each weight."""
        from safetensors import safe_open

        for file in self._files:
            with safe_open(file, framework="np") as opened:
                for spec in _header(file):
                    yield spec.name, opened.get_tensor(spec.name)


def _safetensors_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / _INDEX
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [path / name for name in dict.fromkeys(names)]
    return sorted(path.glob("*.safetensors"))


_SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _header(file: Path) -> Iterator[TensorSpec]:
    from safetensors import safe_open

    with safe_open(file, framework="np") as opened:
        for name in opened.keys():  # noqa: SIM118 - it is no mapping
            piece = opened.get_slice(name)
            kind = piece.get_dtype()
            if kind in _SAFETENSORS_DTYPES:
                yield TensorSpec(name, tuple(piece.get_shape()), _SAFETENSORS_DTYPES[kind])


@frozen(eq=False, kw_only=True)
class PreparedSource:
    """
    A source under other names, in another dtype, or with weights joined that an engine holds as one.

    Attributes:
        source: what is prepared.
        dtype: to cast to; None leaves it.
        rename: regular expressions and what replaces them in names, applied in order.
        fuse: name of a joined weight to those it is joined of, along the first axis; names after `rename`.
    """

    source: WeightSource
    dtype: str | None = None
    rename: Mapping[str, str] = field(factory=dict)
    fuse: Mapping[str, Sequence[str]] = field(factory=dict)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """What comes out; `EngineError` when a part of a joined weight is not there."""
        renamed = (
            TensorSpec(self._name(spec.name), spec.shape, self.dtype or spec.dtype) for spec in self.source.specs
        )
        return tuple(spec for _name, spec in self._fused(((spec.name, spec) for spec in renamed), _join_specs))

    def __iter__(self) -> Iterator[Weight]:
        """Yield each prepared weight, as a numpy array when it was cast or joined."""
        renamed = ((self._name(name), self._cast(array)) for name, array in self.source)
        yield from self._fused(renamed, lambda _name, parts: np.concatenate([as_numpy(part) for part in parts]))

    def _name(self, name: str) -> str:
        for pattern, replacement in self.rename.items():
            name = re.sub(pattern, replacement, name)
        return name

    def _cast(self, array: Any) -> Any:
        if self.dtype is None or _dtype_name(array) == self.dtype:
            return array
        return as_numpy(array).astype(dtype_of(self.dtype))

    def _fused(self, pairs: Iterable[tuple[str, Any]], join: Callable[[str, list[Any]], Any]) -> Iterator[Weight]:
        home = {part: whole for whole, parts in self.fuse.items() for part in parts}
        held: dict[str, dict[str, Any]] = {}
        for name, value in pairs:
            if (whole := home.get(name)) is None:
                yield name, value
                continue
            parts = held.setdefault(whole, {})
            parts[name] = value
            if len(parts) == len(self.fuse[whole]):
                del held[whole]
                yield whole, join(whole, [parts[part] for part in self.fuse[whole]])
        for whole, parts in held.items():
            missing = [part for part in self.fuse[whole] if part not in parts]
            raise EngineError(f"cannot join {whole!r}: there is no weight {missing[0]!r}")


def _join_specs(name: str, parts: list[TensorSpec]) -> TensorSpec:
    rows = sum(part.shape[0] for part in parts)
    return TensorSpec(name, (rows, *parts[0].shape[1:]), parts[0].dtype)


def as_numpy(array: Any) -> Any:
    """Return an array or tensor as a numpy array in host memory, without a copy where that is possible."""
    if not hasattr(array, "detach"):
        return array
    tensor = array.detach().to("cpu").contiguous()
    if _dtype_name(tensor) == "bfloat16":
        # numpy has no bfloat16 of its own: the bits go through integers. What has a tensor has loaded torch.
        return tensor.view(sys.modules["torch"].int16).numpy().view(dtype_of("bfloat16"))
    return tensor.numpy()


def as_tensor(array: Any, torch: Any) -> Any:
    """
    Return a weight as a tensor of torch; a copy when it is a numpy array.

    Args:
        array: what `Engine.update_weights` was given.
        torch: the module, so that this one need not import it.
    """
    if not isinstance(array, np.ndarray):
        return array
    if array.dtype.name == "bfloat16":
        return torch.tensor(array.view(np.int16)).view(torch.bfloat16)
    return torch.tensor(array)


def _dtype_name(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def _data_ptr(tensor: Any) -> int:
    pointer = getattr(tensor, "data_ptr", None)
    return int(pointer()) if pointer is not None and not hasattr(tensor, "full_tensor") else 0
