"""Checks of what an engine returned: an engine is a plugin, which may answer a request with anything."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from reprlib import repr as shown
from typing import Any, Final

import numpy as np
from attrs import evolve, fields

from turnwise.errors import EngineError, TrajectoryError, describe, text_of
from turnwise.record.column_specs import NO_COLUMNS, ColumnSpec, read_numbers
from turnwise.record.open_columns import check_columns
from turnwise.types import Array, Capabilities, FinishReason, GenerateRequest, GenerateResult, TokenArray

_MAX_LOGPROB: Final = 1e-3
"""Engines round: a probability of 1 may come with a log-probability a little above 0."""


def check_result(
    result: GenerateResult,
    request: GenerateRequest,
    capabilities: Capabilities,
    columns: Mapping[str, ColumnSpec] = NO_COLUMNS,
) -> GenerateResult:
    """
    Return a result, with its open columns in the types of their declarations; the record checks the rest.

    Raises:
        EngineError: no engine may return it, or its columns are not declared or do not fit its tokens.
    """
    result = as_plain_result(result)
    ids, limit, vocab_size = result.token_ids, request.sampling.max_tokens, capabilities.vocab_size
    if limit is not None and len(ids) > limit:
        raise EngineError(f"the engine returned {len(ids)} tokens for max_tokens={limit}")
    if result.columns is not None:
        try:
            result = check_columns(result, columns, len(request.token_ids))
        except TrajectoryError as error:
            raise EngineError(str(error)) from error
    if len(ids) == 0:
        return result
    highest = np.maximum.reduce(result.logprobs)
    if highest > _MAX_LOGPROB:
        raise EngineError(f"the engine returned the log-probability {highest:g}, expected at most 0")
    if vocab_size is not None and int(np.maximum.reduce(ids)) >= vocab_size:
        raise EngineError(f"the engine returned the id {int(ids.max())} for a vocabulary of {vocab_size} ids")
    return result


def as_plain_result(result: object) -> GenerateResult:
    """
    Return the answer of an engine as a result of plain values: ints, texts and arrays of numbers.

    A plugin may answer anything. A replica calls this before it packs results of many requests into one message, which
    a value that cannot be packed would cost all of them; the text of an error is the same without replicas.

    Raises:
        EngineError: it is no result, or one of its values is not plain. The episode's side checks the values.
    """
    if not isinstance(result, GenerateResult):
        raise EngineError(f"generate returned {type(result).__name__}, expected a GenerateResult")
    if type(result) is not GenerateResult:  # a subclass may convert nothing
        names = (each.name for each in fields(GenerateResult))
        try:
            result = GenerateResult(**{name: getattr(result, name) for name in names})
        except Exception as error:
            raise EngineError(f"generate returned {type(result).__name__}: {text_of(error)}") from error
    if not isinstance(result.finish_reason, FinishReason):
        reason = shown(result.finish_reason)
        raise EngineError(f"the engine returned the finish reason {reason}, expected a FinishReason")
    cached, stop = result.num_cached_tokens, result.stop_reason
    if not isinstance(cached, int | np.integer):
        raise EngineError(f"the engine returned {shown(cached)} cached tokens, expected an integer")
    if not isinstance(stop, int | str | np.integer | None):
        raise EngineError(f"the engine returned the stop reason {shown(stop)}, expected an integer, a text or None")
    plain: dict[str, Any] = {
        "num_cached_tokens": int(cached),
        "stop_reason": _plain_text(stop) if isinstance(stop, str) else stop if stop is None else int(stop),
        "weight_version": _as_versions(result.weight_version, len(result.token_ids)),
        "columns": _as_arrays(result.columns),
    }
    changed = {name: value for name, value in plain.items() if value is not getattr(result, name)}
    return evolve(result, **changed) if changed else result


def _as_versions(versions: object, num_tokens: int) -> int | TokenArray:
    """Return the weight version of all tokens, or (num_tokens,) int32 of each."""
    if type(versions) is int and 0 <= versions < 2**31:
        return versions
    found = None
    with suppress(Exception):  # of another library too; the error below names the value
        found = np.asarray(versions)
    if found is None or found.dtype.kind not in "iu":
        raise EngineError(f"the engine returned the weight version {shown(versions)}, expected integers")
    if found.shape not in ((), (num_tokens,)):
        count = len(found) if found.ndim == 1 else f"an array of {found.shape}"
        raise EngineError(f"the engine returned {count} weight versions for {num_tokens} tokens")
    if found.size and not (0 <= found.min() and found.max() < 2**31):
        raise EngineError(f"the engine returned the weight version {shown(versions)}, expected 0..2**31-1")
    return found.astype(np.int32, copy=False) if found.ndim else int(found)


def _as_arrays(columns: object) -> Mapping[str, Array] | None:
    """Return open columns as arrays of numbers, whose types and lengths are not checked."""
    if columns is None:
        return None
    if not isinstance(columns, Mapping):
        raise EngineError(f"the engine returned {type(columns).__name__} as columns, expected a mapping")
    try:
        given = dict(columns)
    except Exception as error:
        raise EngineError(f"the columns that the engine returned cannot be read: {describe(error)}") from error
    found: dict[str, Array] = {}
    for name, values in given.items():
        if not isinstance(name, str):
            raise EngineError(f"the engine returned the column {shown(name)}, expected a text as name")
        try:
            found[_plain_text(name)] = read_numbers(name, values)
        except TrajectoryError as error:
            raise EngineError(str(error)) from error
    return found


def _plain_text(text: str) -> str:
    return text if type(text) is str else "".join(text)
