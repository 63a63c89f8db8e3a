"""
Declarations of the columns of a token record: the core's seven, and further ones of plugins.

A column has a value for each token. A record follows the declaration and does not know the meaning of the values: a
fork gives each path its own values, a join puts them in the order of the paths, a cut and a mark keep the
values of the tokens that remain, and a resume restores them. A batch pads them with `ColumnSpec.fill`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import numpy as np
from attrs import asdict, field, frozen
from numpy.typing import ArrayLike, NDArray

from turnwise.errors import PluginError, TrajectoryError, text_of

Tokens = Literal["sampled", "all", "none"]
OnBranch = Literal["keep", "fill"]
TYPES: Final = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
"""The types that a column may have: numpy, torch and files have them in common."""
NO_VERSION: Final = -1
"""Weight version of a token that no policy sampled."""
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_OF_BATCHES: Final = (
    "agent_name as_int64 attention_mask block_positions column cu_seqlens data_source episode_index episode_rewards"
    " field_alignment field_fills fields from_packed from_rows global_step group_index input_ids line_index loss_mask"
    " metrics num_turns objective packed pad_token_id prompt_length prompt_lens prompts response_length"
    " response_lens response_mask responses rm_scores rollout_log_probs rollout_n rows sample_index scored select split"
    " status tensors trajectory_index uid validation visibility with_fields"
)


_NO_NUMBERS: Final = "cmMOSU"
"""Kinds of numpy types whose values numpy would turn into other numbers: complex ones, times, objects and texts."""


def _as_shape(sizes: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(sizes, Iterable):
        return sizes  # `_check_shape` refuses it by the name of the column
    return tuple(int(size) if isinstance(size, np.integer) else size for size in sizes)


def _as_number(value: Any) -> Any:
    """Return the Python number in a value of numpy or torch, which no JSON has; any other value stays."""
    try:
        array = np.asarray(value)
    except Exception:  # noqa: BLE001 - the checks refuse such a value by the name of the column
        return value
    if array.ndim > 0 or array.dtype.kind not in "biuf":
        return value
    return float(array) if array.dtype.kind == "f" else array.item()


def _as_type_name(dtype: Any) -> str:
    if isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, np.generic)):
        return np.dtype(dtype).name
    name: str = dtype  # any other value is refused by the name of the column
    return name


def _fill_key(fill: float) -> object:
    return "nan" if fill != fill else fill  # two fills of nan are equal, and nan is not equal to itself


def _is_lost(array: NDArray[Any], stored: NDArray[Any]) -> bool:
    """Return whether numbers are others in another type; a float may round them, and may not make them infinite."""
    if stored.dtype.kind == "f":
        return not np.isfinite(stored[np.isfinite(array)]).all()
    return not np.array_equal(stored, array)


def read_numbers(name: str, values: ArrayLike) -> NDArray[Any]:
    """Return the values of a column as an array of real numbers; `TrajectoryError` for anything else."""
    where = f"column {name!r}"
    try:
        array = np.asarray(values)
    except Exception as error:  # of another library too, such as a tensor that numpy cannot read
        raise TrajectoryError(f"{where} has values that are no array of numbers: {text_of(error)}") from error
    if array.dtype.kind in _NO_NUMBERS or array.dtype.names is not None:
        raise TrajectoryError(f"{where} has values of {array.dtype}, expected numbers")
    return array


@frozen(kw_only=True)
class ColumnSpec:
    """
    Declares a column: a value of one shape and type for each token of a record.

    Attributes:
        name: of the column, and of the field of batches: lower-case letters, digits and underscores.
        dtype: one of `TYPES`, or a type of numpy with this name.
        shape: of the value of a token; () is a number.
        fill: of all tokens without a value, and of pads; each number of a value is it.
        tokens: the tokens that can have values. `sampled`: the policy sampled them, in the record or before a branch of
            it; an engine gives the values. `all`: any token, prompts too; an engine gives values for the tokens that it
            samples, or for its whole context and these, and a token keeps the first value. `none`: no token has one
            while the episode runs; a scorer gives values for any response token.
        on_branch: of the sampled tokens that a branched record shares with its parent: keep the values, or `fill`.
        version: of the meaning of the values. It is written to files; values of another version are not mixed.
    """

    name: str
    dtype: str = field(converter=_as_type_name)
    shape: tuple[int, ...] = field(default=(), converter=_as_shape)
    fill: float = field(default=0, eq=_fill_key, converter=_as_number)
    tokens: Tokens = "sampled"
    on_branch: OnBranch = "keep"
    version: int = field(default=1, converter=_as_number)

    def __attrs_post_init__(self) -> None:
        where = f"column {self.name!r}"
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise PluginError(f"{where}: a name has lower-case letters, digits and _, and starts with a letter")
        if self.dtype not in TYPES:
            raise PluginError(f"{where} has the type {self.dtype!r}, expected one of {', '.join(TYPES)}")
        if not isinstance(self.shape, tuple) or not all(type(size) is int and size > 0 for size in self.shape):
            raise PluginError(f"{where} has the shape {self.shape}, expected numbers from 1")
        if self.tokens not in ("sampled", "all", "none") or self.on_branch not in ("keep", "fill"):
            raise PluginError(f"{where} has tokens={self.tokens!r} and on_branch={self.on_branch!r}: not known")
        if type(self.version) is not int:
            raise PluginError(f"{where} has the version {self.version!r}, expected an integer")
        self._check_fill(where)

    def _check_fill(self, where: str) -> None:
        try:
            given = np.asarray(self.fill)
            with np.errstate(all="ignore"):
                is_wrong = (
                    given.ndim > 0 or given.dtype.kind in _NO_NUMBERS or _is_lost(given, given.astype(self.dtype))
                )
        except Exception:  # noqa: BLE001 - of another library too
            is_wrong = True
        if is_wrong:
            raise PluginError(f"{where} has the fill {self.fill}, which is no {self.dtype}")

    @property
    def of_responses(self) -> bool:
        """Whether only response tokens can have a value; batches then have none for prompts."""
        return self.tokens != "all"

    def filled(self, num_tokens: int) -> NDArray[Any]:
        """Return (num_tokens, *shape) values of tokens without one."""
        return np.full((num_tokens, *self.shape), self.fill, self.dtype)

    def is_fill(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Return, for each of (n, *shape) values, whether it is all fill, as of a token without one."""
        fill = np.array(self.fill, self.dtype)
        equal = np.isnan(values) if fill.dtype.kind == "f" and np.isnan(fill) else values == fill
        flat: NDArray[np.bool_] = np.asarray(np.reshape(equal, (len(values), math.prod(self.shape))).all(axis=1))
        return flat

    def read(self, values: ArrayLike) -> NDArray[Any]:
        """
        Return (n, *shape) values in the column's type.

        Raises:
            TrajectoryError: they have another shape, or a value that the type does not have.
        """
        where = f"column {self.name!r}"
        array = read_numbers(self.name, values)
        if array.shape == (0,):  # `[]` does not tell the shape of the values that it has none of
            array = array.reshape(0, *self.shape)
        if array.shape[1:] != self.shape or array.ndim == 0:
            expected = ", ".join(["n", *map(str, self.shape)])
            raise TrajectoryError(f"{where} has values of shape {array.shape}, expected ({expected})")
        wanted = np.dtype(self.dtype)
        if array.dtype == wanted:
            return array
        with np.errstate(all="ignore"):
            stored = array.astype(wanted)
        if _is_lost(array, stored):
            raise TrajectoryError(f"{where} has values of {array.dtype} that are no {self.dtype}")
        return stored

    def to_dict(self) -> dict[str, Any]:
        """Return the declaration in plain values, for files; JSON has no number for a fill such as nan."""
        fill = self.fill if math.isfinite(self.fill) else str(self.fill)
        return asdict(self) | {"shape": list(self.shape), "fill": fill}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> ColumnSpec:
        """Return a declaration from a file, whether its plugin is installed or not; `PluginError` for a wrong one."""
        try:
            fill = plain["fill"]
            return cls(**{**plain, "fill": float(fill) if isinstance(fill, str) else fill})
        except (TypeError, ValueError, LookupError) as error:
            raise PluginError(f"the declaration of a column is damaged: {error}") from error


def _core(name: str, dtype: str, tokens: Tokens = "all", fill: float = 0) -> ColumnSpec:
    return ColumnSpec(name=name, dtype=dtype, tokens=tokens, fill=fill)


CORE_COLUMNS: Final[Mapping[str, ColumnSpec]] = {
    each.name: each
    for each in (
        _core("token_ids", "int32"),
        _core("logprobs", "float32", "sampled"),
        _core("origins", "uint8", "none"),  # the record itself sets it
        _core("weight_versions", "int32", "sampled", NO_VERSION),
        _core("position_ids", "int32"),
        _core("block_start", "int32"),
        _core("path_start", "int32"),
    )
}
"""The columns of every record. Its segments follow from `origins`, and its layout is in the last three."""

NO_COLUMNS: Final[Mapping[str, ColumnSpec]] = {}


TAKEN: Final = frozenset({*CORE_COLUMNS, *_OF_BATCHES.split(), "training_step", "advantages"})
"""Names that no plugin may give a column: the core's columns and the attributes of batches and rows have them."""


def check_open(spec: ColumnSpec) -> None:
    """Raise `PluginError` when the column of a plugin has a name that is taken."""
    if spec.name in TAKEN:
        raise PluginError(f"column {spec.name!r}: every record or batch has something of that name; choose another")
