"""
Open columns of a token record: saving and restoring them, filling them after the episode, and comparing them.

`turnwise.record.column_specs` declares them; `turnwise.record.columns` keeps their values beside the core's.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import numpy as np
from attrs import evolve
from numpy.typing import ArrayLike

from turnwise.errors import TrajectoryError
from turnwise.record.column_specs import NO_COLUMNS, TYPES, ColumnSpec, check_open
from turnwise.record.columns import TokenColumns, TokenRecord, is_in_turn, is_sampled
from turnwise.types import Array, GenerateResult

_SAVED: Final = "open_columns"


def save_open(columns: TokenColumns, num_tokens: int) -> dict[str, Any]:
    """Return the open columns of the first tokens for `restore_open`, under one key; nothing without any."""
    if not columns.open:
        return {}
    return {_SAVED: [(spec.to_dict(), columns.view(name)[:num_tokens].copy()) for name, spec in columns.open.items()]}


def restore_open(saved: Mapping[str, Any], num_tokens: int) -> list[tuple[ColumnSpec, Array]]:
    """
    Return the open columns that `save_open` or `to_plain` saved, each with a value for each token.

    Raises:
        TrajectoryError: a column has another number of values.
        PluginError: a declaration is damaged.
    """
    found: list[tuple[ColumnSpec, Array]] = []
    for plain, values in saved.get(_SAVED, ()):
        spec = ColumnSpec.from_dict(plain)
        check_open(spec)
        array = spec.read(decode(values) if isinstance(values, Mapping) else values)
        if len(array) != num_tokens:
            raise TrajectoryError(f"column {spec.name!r} has {len(array)} values for {num_tokens} tokens")
        found.append((spec, array))
    return found


def keep_open(saved: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the result of `Trajectory.to_dict` of a record without open paths, with some of its open columns."""
    return {**saved, _SAVED: [(spec, values) for spec, values in saved.get(_SAVED, ()) if spec["name"] in names]}


def to_plain(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of `Trajectory.to_dict` with its open columns as plain values, for a file of JSON."""
    plain = dict(saved)
    if _SAVED in plain:
        plain[_SAVED] = [[spec, encode(values)] for spec, values in plain[_SAVED]]
    if "open_paths" in plain:
        plain["open_paths"] = list(map(to_plain, plain["open_paths"]))
    return plain


def encode(values: Array) -> dict[str, Any]:
    """Return values exactly, in plain values: `data` is base64 of their bytes, little-endian, the last axis fastest."""
    little = values.astype(values.dtype.newbyteorder("<"))
    data = base64.b64encode(little.tobytes()).decode("ascii")
    return {"dtype": values.dtype.name, "shape": list(values.shape), "data": data}


def decode(plain: Mapping[str, Any]) -> Array:
    """Return the values of `encode`; `TrajectoryError` when they are damaged."""
    try:
        if plain["dtype"] not in TYPES:
            raise TypeError(f"unknown type {plain['dtype']!r}")  # noqa: TRY301 - described below, as numpy's errors are
        dtype, data = np.dtype(plain["dtype"]), base64.b64decode(plain["data"], validate=True)
        values: Array = np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype).reshape(plain["shape"])
    except (ValueError, TypeError, LookupError) as error:
        raise TrajectoryError(f"the values of a column are damaged: {error}") from error
    return values


def decode_column(spec: ColumnSpec, data: str) -> Array:
    """Return (n, *shape) values of a column from the `data` of `encode`; `TrajectoryError` when it is damaged."""
    return decode({"dtype": spec.dtype, "shape": [-1, *spec.shape], "data": data})


def empty_replayed(columns: Mapping[str, Any], specs: Iterable[ColumnSpec]) -> None:
    """Set the sampled tokens of copied columns to their fill where a branched record does not keep their values."""
    for spec in specs:
        if spec.on_branch == "fill":
            columns[spec.name][is_in_turn(columns["origins"])] = spec.fill


def put_column(
    columns: dict[str, Any],
    held: Mapping[str, ColumnSpec],
    spec: ColumnSpec,
    values: ArrayLike,
    num_prompt_tokens: int,
) -> list[ColumnSpec]:
    """Put the values of a scorer into the copied columns of a record, and return the declarations of all of them."""
    check_open(spec)
    if held.get(spec.name, spec) != spec:
        raise TrajectoryError(f"column {spec.name!r} is declared otherwise than in the record: {held[spec.name]}")
    array, origins = spec.read(values), columns["origins"]
    whole = spec.filled(len(origins))
    own = whole[num_prompt_tokens:] if spec.of_responses else whole
    if len(array) != len(own):
        raise TrajectoryError(f"column {spec.name!r} has {len(array)} values for {len(own)} tokens")
    own[:] = array
    if spec.tokens == "sampled" and not spec.is_fill(whole[~is_sampled(origins)]).all():
        raise TrajectoryError(f"column {spec.name!r} has a value of a token that the policy did not sample")
    columns[spec.name] = whole
    return [*(each for name, each in held.items() if name != spec.name), spec]


# The results of engines


def check_columns(result: GenerateResult, specs: Mapping[str, ColumnSpec], num_context: int) -> GenerateResult:
    """
    Return a plain result with its columns in the types of their declarations.

    Raises:
        TrajectoryError: no plugin declares a column, or its values do not fit the tokens.
    """
    found: dict[str, Array] = {}
    num_new = len(result.token_ids)
    for name, values in (result.columns or {}).items():
        spec = find_spec(name, specs)
        found[name] = spec.read(values)
        allowed = {num_new} if spec.of_responses else {num_new, num_context + num_new}
        if spec.tokens == "none":
            raise TrajectoryError(f"the engine returned the column {name!r}, which only a scorer may give")
        if len(found[name]) not in allowed:
            raise TrajectoryError(f"the engine returned {len(found[name])} values of {name!r} for {num_new} tokens")
    return evolve(result, columns=found or None)


def find_spec(name: str, specs: Mapping[str, ColumnSpec], giver: str = "the engine") -> ColumnSpec:
    """Return the declaration of a column; `TrajectoryError` when no plugin declares it."""
    if name not in specs:
        known = ", ".join(sorted(specs)) or "none"
        raise TrajectoryError(f"{giver} returned the column {name!r}, which no plugin declares; declared: {known}")
    return specs[name]


def add_turn(
    record: TokenRecord, result: GenerateResult, specs: Mapping[str, ColumnSpec], *, constrained: bool
) -> None:
    """Append the tokens of a result to a record, and the values of its columns."""
    given = result.columns or {}
    columns = [(find_spec(name, specs), values) for name, values in given.items()] if given else ()
    record.add_action(
        result.token_ids, result.logprobs, result.weight_version, constrained=constrained, columns=columns
    )


def join_columns(
    first: GenerateResult, rest: GenerateResult, specs: Mapping[str, ColumnSpec] = NO_COLUMNS
) -> Mapping[str, Array] | None:
    """
    Return the columns of two parts of a turn as columns of the whole turn.

    A token of the first part that has no value in a declared column takes the one that the rest gives for its context.

    Raises:
        TrajectoryError: one part has a column that the other lacks.
    """
    parts = [part for part in (first, rest) if len(part.token_ids)]
    if len(parts) < 2:
        return (parts or [rest])[0].columns
    before, after = first.columns or {}, rest.columns or {}
    if set(before) != set(after):
        lacking = min(set(before) ^ set(after))
        raise TrajectoryError(
            f"the engine returned the column {lacking!r} for one part of a turn and not for the other"
        )
    joined: dict[str, Array] = {}
    for name, values in before.items():
        context, new = np.split(after[name], [len(after[name]) - len(rest.token_ids)])
        if name in specs and len(context) >= len(values):
            holes, own = specs[name].is_fill(values), context[len(context) - len(values) :]
            values = np.where(holes.reshape(-1, *[1] * (values.ndim - 1)), own, values)
        joined[name] = np.concatenate([values, new])
    return joined or None


def specs_of(result: GenerateResult, specs: Mapping[str, ColumnSpec]) -> Mapping[str, ColumnSpec]:
    """Return the declarations of the columns of a result with tokens."""
    if not result.columns or not len(result.token_ids):
        return NO_COLUMNS
    return {name: find_spec(name, specs) for name in result.columns}


def check_same(saved: Mapping[str, ColumnSpec], specs: Mapping[str, ColumnSpec]) -> None:
    """Raise `TrajectoryError` when a plugin declares a column otherwise than in the saved part of a turn."""
    for name, spec in saved.items():
        if specs.get(name, spec) != spec:
            raise TrajectoryError(f"column {name!r} is declared otherwise than in the first part of its turn: {spec}")


def drop_last(result: GenerateResult) -> Mapping[str, Array] | None:
    """Return the columns of a result without the values of its last token."""
    return result.columns and {name: values[:-1] for name, values in result.columns.items()}
