"""The file of a batch, written without torch: the rollouts of an engine elsewhere need none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Unpack

from turnwise.batch.columns import COLUMNS, ROW_NAMES, BatchRow
from turnwise.batch.packed_arrays import PackedArrays
from turnwise.batch.padding import Widths
from turnwise.files import atomic_write, raise_disk_error
from turnwise_result_files.media import MediaFolder

METADATA_KEY: Final = "turnwise.packed_batch"
BATCH_VERSION: Final = 2
"""Of the file. In a file of version 1, which names none, columns of response tokens have entries for prompts too."""


def save_arrays(arrays: PackedArrays, path: str | Path, *, pad_token_id: int, **widths: Unpack[Widths]) -> None:
    """
    Write the file that `save_batch` writes of the same rows, whole or not at all.

    Args:
        arrays: of the rows.
        path: of the file.
        pad_token_id: for `load_batch`.
        widths: the numbers of columns that `load_batch` pads to.

    Raises:
        OSError: the disk takes no more.
    """
    from safetensors.numpy import save_file

    rows = {name: [getattr(row, name) for row in arrays.rows] for name in ROW_NAMES}
    metadata = {
        "version": BATCH_VERSION,
        "widths": widths,
        "pad_token_id": pad_token_id,
        "num_rows": len(arrays.rows),
        "rows": rows,
        "field_alignment": dict(arrays.field_alignment),
        "field_fills": dict(arrays.field_fills),
        **picture_metadata(arrays.rows, path),
    }
    columns = arrays.columns.items()
    tensors = {name: values for name, values in columns if values.any() or not COLUMNS[name].is_index}
    tensors |= {"cu_seqlens": arrays.cu_seqlens, "prompt_lens": arrays.prompt_lens, **arrays.fields}
    write_batch_file(tensors, path, metadata, save_file)


def picture_metadata(rows: Sequence[BatchRow], path: str | Path) -> dict[str, Any]:
    """Return the places of the pictures of rows, which are written to `media` beside a file; nothing without any."""
    if not any(row.pictures for row in rows):
        return {}
    media = MediaFolder(Path(path).parent)
    return {"pictures": [media.put_places(row.pictures) for row in rows]}


def write_batch_file(
    tensors: Mapping[str, object], path: str | Path, metadata: Mapping[str, object], save: Callable[..., None]
) -> None:
    """Write tensors with a function of safetensors, whole or not at all; `OSError` when the disk takes no more."""
    from safetensors import SafetensorError

    with atomic_write(path) as partial:
        partial.touch()
        mode = partial.stat().st_mode
        try:
            save(dict(tensors), partial, {METADATA_KEY: json.dumps(metadata)})
        except SafetensorError as error:
            raise_disk_error(error)
            raise
        partial.chmod(mode)  # safetensors makes a private file, whatever the umask
