"""
The folder `media` beside files of results: each picture once, under the name of its content.

Files hold references. A picture of a message has the relative path of its file as URL, and a record has the places of
its pictures with these paths. Files of results without pictures are as they would be without this module.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import define, field

from turnwise.errors import DataError
from turnwise.files import atomic_write
from turnwise.media import (
    SUFFIXES,
    Picture,
    PlacedPicture,
    find_picture,
    is_picture_part,
    picture_part,
    read_picture_part,
)
from turnwise.record.trajectory import Trajectory
from turnwise.types import Message

MEDIA: Final = "media"
COLUMN: Final = "pictures"
"""Name of the pictures of a record among the open columns of its row."""
DECLARATION: Final = '{"turnwise": "pictures"}'
"""In place of the declaration of a column, which no plugin can write; earlier versions refuse such a file."""
_MEDIA_TYPES: Final = {suffix: media_type for media_type, suffix in SUFFIXES.items()}
_REFERENCE: Final = re.compile(rf"{MEDIA}/([0-9a-f]{{64}})(\.[a-z]+)")
Place = Sequence[Any]
"""The first token of a picture, the number of its tokens, and the reference to its file."""


@define(eq=False)
class MediaFolder:
    """
    The pictures of the files in a folder of results; `media` appears with the first picture.

    Attributes:
        folder: of the results.
    """

    folder: Path
    _known: dict[str, Picture] = field(factory=dict, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def put(self, picture: Picture) -> str:
        """Write a picture unless its file is there, and return the reference; `OSError` if the disk refuses it."""
        reference = f"{MEDIA}/{picture.file_name}"
        with self._lock:
            if reference not in self._known:
                file = self.folder / reference
                if not file.exists():
                    with atomic_write(file) as partial:
                        partial.write_bytes(picture.data)
                self._known[reference] = picture
        return reference

    def get(self, reference: str) -> Picture:
        """Return the picture of a reference; `DataError` if its file is missing or has another content."""
        found = _REFERENCE.fullmatch(reference)
        if found is None or found[2] not in _MEDIA_TYPES:
            raise DataError(f"{reference!r:.100} is no reference to a picture")
        with self._lock:
            if reference in self._known:
                return self._known[reference]
            file = self.folder / reference
            try:
                picture = find_picture(file.read_bytes(), _MEDIA_TYPES[found[2]])
            except OSError as error:
                raise DataError(f"{file}: the picture cannot be read: {error.strerror}") from error
            if picture.key != found[1]:
                raise DataError(f"{file}: the picture has changed since it was written")
            self._known[reference] = picture
            return picture

    def put_messages(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages with references in place of pictures; the same object without any."""
        return _replace_parts(messages, self._put_part)

    def get_messages(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages with pictures in place of references; `DataError` as in `get`."""
        return _replace_parts(messages, self._get_part)

    def put_places(self, pictures: Iterable[PlacedPicture]) -> list[Place]:
        """Return the places of pictures, with references."""
        return [(each.start, each.num_tokens, self.put(each.picture)) for each in pictures]

    def get_places(self, places: Iterable[Place]) -> tuple[PlacedPicture, ...]:
        """Return the pictures of places; `DataError` as in `get`."""
        return tuple(
            PlacedPicture(start=start, num_tokens=num_tokens, picture=self.get(reference))
            for start, num_tokens, reference in places
        )

    def put_saved(self, saved: Mapping[str, object]) -> dict[str, Any]:
        """Return the result of `Trajectory.to_dict` with places in place of pictures, also in open paths."""
        return _replace_saved(saved, self.put_places)

    def get_saved(self, saved: Mapping[str, object]) -> dict[str, Any]:
        """Return the result of `put_saved` as it was; `DataError` as in `get`."""
        return _replace_saved(saved, self.get_places)

    def remove(self) -> None:
        """Remove the pictures of earlier results, and the folder if nothing else is in it."""
        folder = self.folder / MEDIA
        if folder.is_dir():
            for file in folder.iterdir():
                if _REFERENCE.fullmatch(f"{MEDIA}/{file.name}"):
                    file.unlink()
            if not any(folder.iterdir()):
                folder.rmdir()
        self._known.clear()

    def _put_part(self, part: Mapping[str, object]) -> object:
        try:
            picture = read_picture_part(part)
        except DataError:  # a part of a plugin in another form stays as it is
            return part
        return {"type": "image_url", "image_url": {"url": self.put(picture)}}

    def _get_part(self, part: Mapping[str, object]) -> object:
        held = part.get("image_url")
        url = held.get("url") if isinstance(held, Mapping) else None
        return picture_part(self.get(url)) if isinstance(url, str) and _REFERENCE.fullmatch(url) else part


def open_column(record: Trajectory, media: MediaFolder) -> dict[str, str]:
    """Return the pictures of a record as one of the open columns of its row."""
    return {"name": COLUMN, "declaration": DECLARATION, "values": json.dumps(media.put_places(record.pictures))}


def _replace_saved(saved: Mapping[str, Any], replace: Callable[[Any], object]) -> dict[str, Any]:
    found = dict(saved)
    if "pictures" in found:
        found["pictures"] = replace(found["pictures"])
    if "open_paths" in found:
        found["open_paths"] = [_replace_saved(each, replace) for each in found["open_paths"]]
    return found


def _replace_parts(messages: Sequence[Message], replace: Callable[[Mapping[str, Any]], object]) -> Sequence[Message]:
    if not any(_has_pictures(message) for message in messages):
        return messages
    return [
        {**message, "content": [replace(part) if is_picture_part(part) else part for part in message["content"]]}
        if _has_pictures(message)
        else message
        for message in messages
    ]


def _has_pictures(message: object) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list | tuple) and any(map(is_picture_part, content))
