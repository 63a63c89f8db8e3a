"""
Pictures in the messages of rows, which become the form of `turnwise.media`: the tasks hold all bytes that a run needs.

A part ``{"type": "image", "path": "cat.png"}`` names a file beside the data set, and a part of the type `image_url` has
a `data:` URL. Nothing is fetched.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from turnwise.errors import DataError
from turnwise.media import MAX_PICTURE_BYTES, is_picture_part, picture_part, read_picture, read_picture_part
from turnwise.types import JsonDict


def read_part(part: JsonDict, where: str, folder: Path | None) -> JsonDict:
    """
    Return a part of a content with the bytes of its picture, and any other part as it is.

    Args:
        part: as the row has it.
        where: its place, for errors.
        folder: of the data set; None for rows that are in no file.

    Raises:
        DataError: the picture is elsewhere, missing, too large, or of no known type.
    """
    if not is_picture_part(part):
        return part
    if part["type"] == "image":
        return picture_part(read_picture(_read_file(part, where, folder), f"{where}: {part['path']!r:.100}"))
    try:
        return picture_part(read_picture_part(part))
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def _read_file(part: JsonDict, where: str, folder: Path | None) -> bytes:
    path: object = part.get("path")
    if not isinstance(path, str) or not path:
        raise DataError(f'{where}: a picture needs the form {{"type": "image", "path": "FILE"}}')
    if folder is None:
        raise DataError(f"{where}: the picture {path!r:.100} is beside no file: give its bytes as a data: URL")
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts or "://" in path:
        raise DataError(f"{where}: the picture {path!r:.100} must be a path below the folder of the data set")
    file = folder.joinpath(*parts)
    try:
        if file.is_file() and file.stat().st_size > MAX_PICTURE_BYTES:
            raise DataError(f"{where}: {path!r:.100} has {file.stat().st_size} bytes, more than {MAX_PICTURE_BYTES}")
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{where}: the picture {path!r:.100} cannot be read: {error.strerror}") from error
