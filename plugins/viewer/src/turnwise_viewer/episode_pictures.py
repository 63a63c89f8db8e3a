"""
The pictures that an episode refers to, in the folder `media` beside its file.

Only a name in an episode is read, whose form leaves no way out of the folder. The bytes of a file must have the digest
that is its name, and must begin as a known type of picture: SVG and HTML are none, so a browser runs nothing of a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from turnwise.errors import DataError
from turnwise.media import MAX_PICTURE_BYTES, SUFFIXES, Picture, is_picture_part, read_picture
from turnwise.types import JsonDict
from turnwise_result_files.media import DECLARATION, MEDIA

_REFERENCE: Final = re.compile(rf"{MEDIA}/([0-9a-f]{{64}})({'|'.join(map(re.escape, SUFFIXES.values()))})")
_HEAD_BYTES: Final = 64
"""Enough to tell the type of a picture."""


def list_references(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the references to pictures in the messages and the records of an episode, each once."""
    named = (each for row in rows for each in _named_in(row))
    return [each for each in dict.fromkeys(named) if _REFERENCE.fullmatch(each)]


def describe_pictures(rows: Sequence[Mapping[str, object]], folder: Path) -> JsonDict:
    """Return the size of each picture of an episode in bytes, and why it cannot be shown, or null."""
    return {each: _describe(folder / each) for each in list_references(rows)}


def find_picture_file(rows: Sequence[Mapping[str, object]], folder: Path, reference: str) -> Picture:
    """
    Return the picture of a reference.

    Args:
        rows: of the episode.
        folder: with the folder `media`.
        reference: that the episode has.

    Raises:
        DataError: the episode has no such reference, or the file is missing, too large, changed, or no picture.
    """
    if reference not in list_references(rows):
        raise DataError(f"the episode has no picture {reference[:100]!r}")
    file = folder / reference
    described = _describe(file)
    if described["problem"] is not None:
        raise DataError(f"{reference}: {described['problem']}")
    picture = read_picture(file.read_bytes(), reference)
    if picture.key != file.stem:
        raise DataError(f"{reference}: the file has changed since it was written")
    return picture


def place_pictures(row: Mapping[str, Any]) -> list[list[Any]]:
    """Return the first token, the number of tokens and the reference of each picture of a record."""
    columns = (each for each in row.get("open_columns") or () if each["declaration"] == DECLARATION)
    return [place for each in columns for place in json.loads(each["values"])]


def _named_in(row: Mapping[str, Any]) -> Iterator[str]:
    for name in ("task_messages", "messages"):
        for message in json.loads(row[name]):
            content = message.get("content") if isinstance(message, dict) else None
            yield from filter(None, map(_reference_of, content if isinstance(content, list) else ()))
    yield from (str(reference) for _start, _num_tokens, reference in place_pictures(row))


def _reference_of(part: object) -> str:
    held = part.get("image_url") if isinstance(part, dict) and is_picture_part(part) else None
    url = held.get("url") if isinstance(held, dict) else None
    return url if isinstance(url, str) else ""


def _describe(file: Path) -> JsonDict:
    try:
        if not file.is_file():
            return {"bytes": 0, "problem": "its file is missing"}
        size = file.stat().st_size
        if size > MAX_PICTURE_BYTES:
            return {"bytes": size, "problem": f"its file has more than {MAX_PICTURE_BYTES} bytes"}
        with file.open("rb") as opened:
            read_picture(opened.read(_HEAD_BYTES))
    except OSError as error:
        return {"bytes": 0, "problem": f"its file cannot be read: {error.strerror}"}
    except DataError:
        return {"bytes": size, "problem": "its file is no picture of a known type"}
    return {"bytes": size, "problem": None}
