"""
Pictures in the parts of requests. Their bytes are in the request, or on a server that the run lists.

Each dialect has its own form of a part. All become the one of `turnwise.media`, whose type the bytes tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from attrs import define, field, frozen

from turnwise.errors import ConfigError, DataError
from turnwise.media import picture_part, read_picture, read_picture_part
from turnwise.sized_cache import SizedCache
from turnwise_gateway.contents import Content, Part, build_content, text_part
from turnwise_gateway.dialects.fetched_pictures import fetch_picture, is_fetchable
from turnwise_gateway.dialects.fields import Fields, refuse, refuse_unsupported
from turnwise_gateway.limits import CheckPicture

_MAX_KNOWN_CHARS: Final = 64 * 1024 * 1024


@define(eq=False)
class PictureReader:
    """
    Reads the pictures of a session's requests, each once: a client sends all of them with every call.

    Attributes:
        check: raises the error for a picture that the run cannot show.
        hosts: of URLs that are fetched.
    """

    check: CheckPicture
    hosts: tuple[str, ...] = ()
    _known: SizedCache[str, Part] = field(factory=lambda: SizedCache(_MAX_KNOWN_CHARS), init=False)

    def read(self, url: str, path: str) -> Part:
        """Return the part of a picture, the same object each time; `CallRefusedError` names its place."""
        known = self._known.get(url)
        if known is None:
            known = self._read(url, path)
            self._known.put(url, known, len(known["image_url"]["url"]))
        return known

    def _read(self, url: str, path: str) -> Part:
        try:
            if self.hosts and is_fetchable(url):
                picture = read_picture(fetch_picture(url, self.hosts), f"the file of {url[:60]!r}")
            else:
                picture = read_picture_part({"type": "image_url", "image_url": {"url": url}})
            self.check(picture)
        except DataError as error:
            raise refuse(path, f"cannot be used: {error}") from error
        except ConfigError as error:
            raise refuse_unsupported(path, str(error)) from error
        part: Part = picture_part(picture)
        # One text in memory instead of two equal ones, for it may have megabytes.
        return {"type": "image_url", "image_url": {"url": url}} if part["image_url"] == {"url": url} else part


@frozen
class PictureForm:
    """
    The pictures of a dialect.

    Attributes:
        kind: type of their parts.
        find_url: returns the URL of a part; `CallRefusedError` for a part with something else.
    """

    kind: str
    find_url: Callable[[Fields], str]


def read_content(
    owner: Fields, key: str, kinds: Mapping[str, str], separator: str, form: PictureForm, reader: PictureReader | None
) -> Content:
    """
    Return a field that is a text, or a list of texts and pictures.

    Args:
        owner: the object with the field.
        key: of the field.
        kinds: types of parts that are text, each with the key of its text.
        separator: between two texts beside each other.
        form: of the pictures.
        reader: of the pictures; None if the run takes none.
    """
    if not isinstance(owner.value(key), list):
        return owner.text(key) or ""
    return build_content((read_part(part, kinds, form, reader) for part in owner.objects(key)), separator)


def read_part(part: Fields, kinds: Mapping[str, str], form: PictureForm, reader: PictureReader | None) -> Part:
    """Return a part of a content; `CallRefusedError` names its place if it is neither a text nor a picture."""
    kind = part.text("type") or "none"
    if kind == form.kind and reader is not None:
        return reader.read(form.find_url(part), part.path)
    if kind not in kinds:
        reads = "text only" if reader is None else f"texts and parts of type {form.kind!r} only"
        raise refuse_unsupported(part.path, f"it has the type {kind!r}, and the model reads {reads}")
    return text_part(part.text(kinds[kind]) or "")
