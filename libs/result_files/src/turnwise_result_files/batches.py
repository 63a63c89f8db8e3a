"""Batches of tensors in files and as TensorDicts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack, cast

import numpy as np
from attrs import evolve

from turnwise import PackedBatch, RolloutBatch
from turnwise.batch.columns import COLUMNS, ROW_NAMES, BatchRow, Column
from turnwise.batch.packed_batch import no_layout
from turnwise.batch.padding import Widths
from turnwise.errors import DataError, PluginError
from turnwise_result_files.batch_file import BATCH_VERSION, METADATA_KEY, picture_metadata, write_batch_file
from turnwise_result_files.media import MediaFolder

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

_PACKED: Final = (*COLUMNS, "cu_seqlens", "prompt_lens")
_PADDED: Final = (*COLUMNS, "attention_mask")
_OF_FIELDS: Final = ("field_fills", "field_alignment")


def save_batch(batch: PackedBatch | RolloutBatch, path: str | Path, **widths: Unpack[Widths]) -> None:
    """
    Write the real tokens to a safetensors file, whole or not at all, with the other values as JSON in its metadata.

    Args:
        batch: packed or padded; pads are not written, and fields are padded with 0 when the file is loaded.
        path: of the file.
        widths: the numbers of columns that `load_batch` pads to; without them, a padded batch keeps its own, and the
            longest rows of a packed one decide.

    Raises:
        OSError: the disk takes no more.
    """
    from safetensors.torch import save_file

    if isinstance(batch, RolloutBatch):
        widths = widths or {"prompt_length": batch.prompt_length, "response_length": batch.response_length}
        batch = batch.packed()
    metadata = {
        "version": BATCH_VERSION,
        "widths": widths,
        "pad_token_id": batch.pad_token_id,
        "num_rows": len(batch),
        "rows": {name: batch.column(name) for name in ROW_NAMES},
        "field_alignment": dict(batch.field_alignment),
        "field_fills": dict(batch.field_fills),
        **picture_metadata(batch.rows, path),
    }
    # A batch without blocks has no layout in its file: positions count tokens.
    empty = {name for name, column in COLUMNS.items() if column.is_index and not getattr(batch, name).any()}
    if batch.block_positions is None:
        empty.add("position_ids")
    tensors = {name: getattr(batch, name) for name in _PACKED if name not in empty} | dict(batch.fields)
    write_batch_file(_separate(tensors), path, metadata, save_file)


def load_batch(path: str | Path, **widths: Unpack[Widths]) -> RolloutBatch:
    """
    Read and pad a file of `save_batch`, to its own widths unless some are given.

    Raises:
        DataError: the file is missing or holds no batch.
        TrajectoryError: a row does not fit.
    """
    packed, saved = _read_file(path)
    return RolloutBatch.from_packed(packed, **(widths or saved))


def load_packed_batch(path: str | Path) -> PackedBatch:
    """Read a file of `save_batch` without pads; `DataError` when it is missing or holds no batch."""
    return _read_file(path)[0]


def to_tensordict(batch: RolloutBatch) -> TensorDict:
    """
    Return a TensorDict of batch size (B,) with all tensors, `prompts`, `responses` and the fields, by name.

    The attributes of `rows` and `pad_token_id` are non-tensor data. Needs `turnwise-result-files[tensordict]`.
    `PluginError` for a batch with pictures.
    """
    from tensordict import NonTensorStack, TensorDict

    if any(row.pictures for row in batch.rows):
        raise PluginError("a TensorDict has no place for the pictures of a batch: read them from the episodes")
    tensors = {name: getattr(batch, name) for name in (*_PADDED, "prompts", "responses")} | dict(batch.fields)
    result = TensorDict(tensors, batch_size=[len(batch)])
    for name in ROW_NAMES:
        values = [str(value) if name == "status" else value for value in batch.column(name)]
        result[name] = NonTensorStack(*values) if values else NonTensorStack(batch_size=[0])
    result.set_non_tensor("pad_token_id", batch.pad_token_id)
    if batch.field_fills:
        result.set_non_tensor("field_fills", dict(batch.field_fills))
    if batch.field_alignment:
        result.set_non_tensor("field_alignment", dict(batch.field_alignment))
    return result


def from_tensordict(tensordict: TensorDict) -> RolloutBatch:
    """
    Restore a batch from the result of `to_tensordict`, from rows of it, or from a concatenation of such.

    Raises:
        PluginError: an entry is missing, or an added one has a shape that no field may have.
    """
    own, names = {*_PADDED, *ROW_NAMES, "prompts", "responses", "pad_token_id"}, set(map(str, tensordict.keys()))
    if missing := sorted(own - names):
        raise PluginError(f"a TensorDict of a batch lacks {', '.join(missing)}")
    others = {name: tensordict[name] for name in _OF_FIELDS if name in names}
    batch = RolloutBatch(
        **{name: tensordict[name] for name in _PADDED},
        rows=_make_rows({name: tensordict.get(name).tolist() for name in ROW_NAMES}, tensordict.batch_size[0]),
        prompt_length=tensordict["prompts"].shape[1],
        pad_token_id=tensordict["pad_token_id"],
        **others,
    )
    return batch.with_fields({name: tensordict[name] for name in sorted(names - own - {*_OF_FIELDS})})


def _read_file(path: str | Path) -> tuple[PackedBatch, Widths]:
    """Return the batch in a file, and the widths that it was saved with; errors as in `load_packed_batch`."""
    from safetensors import SafetensorError, safe_open

    if Path(path).exists() and not Path(path).is_file():
        raise DataError(f"{path}: is no regular file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {})[METADATA_KEY])
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        _upgrade(metadata, tensors)
        positions = tensors.pop("position_ids", None)
        layout = no_layout(len(tensors["input_ids"]))
        columns = {
            name: layout[name] if name in layout and name not in tensors else tensors.pop(name)
            for name in _PACKED
            if name != "position_ids"
        }
        _check_columns(columns if positions is None else columns | {"position_ids": positions})
        packed = PackedBatch(
            **columns,
            block_positions=positions,
            rows=_with_pictures(_make_rows(metadata["rows"], metadata["num_rows"]), metadata, path),
            pad_token_id=metadata["pad_token_id"],
            fields={name: tensors[name] for name in metadata["field_alignment"]},
            field_alignment=metadata["field_alignment"],
            field_fills=metadata.get("field_fills", {}),
        )
        widths = {name: metadata["widths"][name] for name in Widths.__annotations__ if name in metadata["widths"]}
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (SafetensorError, OSError, LookupError, ValueError, TypeError) as error:
        raise DataError(f"{path}: not a saved batch: {type(error).__name__}: {error}") from error
    return packed, cast(Widths, widths)


def _upgrade(metadata: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Bring the tensors of a file of version 1 into the form of this version."""
    version = metadata.get("version", 1)
    if version not in {1, BATCH_VERSION}:
        raise ValueError(f"the file has version {version}, this turnwise reads versions up to {BATCH_VERSION}")
    if version == BATCH_VERSION:
        return
    ends, prompt_lens = tensors["cu_seqlens"].tolist(), tensors["prompt_lens"].tolist()
    kept = np.ones(len(tensors["input_ids"]), bool)
    for start, num_prompt in zip(ends, prompt_lens, strict=False):
        kept[start : start + num_prompt] = False
    alignments = {name: column.alignment for name, column in COLUMNS.items()} | metadata["field_alignment"]
    for name, alignment in alignments.items():
        if alignment == "response":
            tensors[name] = tensors[name][kept]


def _make_rows(columns: Mapping[str, Sequence[Any]], size: int) -> tuple[BatchRow, ...]:
    """Make rows from columns of plain values, each with `size` of them."""
    return tuple(BatchRow(**{name: columns[name][i] for name in ROW_NAMES}) for i in range(size))


def _with_pictures(rows: tuple[BatchRow, ...], metadata: Mapping[str, Any], path: str | Path) -> tuple[BatchRow, ...]:
    places = metadata.get("pictures")
    if places is None:
        return rows
    media = MediaFolder(Path(path).parent)
    pairs = zip(rows, places, strict=True)
    return tuple(evolve(row, pictures=media.get_places(each)) for row, each in pairs)


def _check_columns(columns: Mapping[str, Any]) -> None:
    """Raise a `ValueError` that names the first column of a file with another type, or with a value out of range."""
    import torch

    wanted = {**COLUMNS, "cu_seqlens": Column(np.int32, "row"), "prompt_lens": Column(np.int64, "row", low=0)}
    for name, values in columns.items():
        column = wanted[name]
        dtype = torch.from_numpy(np.empty(0, column.dtype)).dtype
        if values.dtype != dtype:
            raise ValueError(f"column {name!r} has type {values.dtype}, expected {dtype}")
        if values.numel() and column.low is not None:
            low, high = (each.item() for each in values.aminmax())
            if not (column.low <= low and high <= column.high):  # also of nan
                bounds = f"{column.low:g} to {column.high:g}"
                raise ValueError(f"column {name!r} has values from {low} to {high}, expected {bounds}")


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors that share no memory, because the format refuses others; most are not copied."""
    separate: dict[str, Any] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if storage in storages else tensor.contiguous()
        storages.add(storage)
    return separate
