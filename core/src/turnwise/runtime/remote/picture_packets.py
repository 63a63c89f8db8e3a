"""
Messages of tasks and results, in which each picture travels once.

Ray pickles the calls between driver and workers. A task, its result and its saved state hold a picture in many places:
as an object, and as a `data:` URL in messages. A packet has all of it pickled with names in these places, and the bytes
of the pictures that the receiver does not hold yet. The sender decides what the receiver holds, so packets are
unpacked in the order in which they were packed, and a process that restarts needs a new sender at its peer.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from typing import Any, Final, Generic, TypeVar, cast

from attrs import define, field, frozen

from turnwise.errors import DataError
from turnwise.media import Picture, PictureName, is_picture_part, picture_part, read_picture_part
from turnwise.sized_cache import SizedCache
from turnwise.types import Message

T = TypeVar("T")

_MAX_BYTES: Final = 128 << 20
_MAX_URL_CHARACTERS: Final = 32 << 20
_URL: Final = "data:image/"


@frozen(kw_only=True, eq=False)
class Packet(Generic[T]):
    """
    A pickled value with names in place of pictures.

    Attributes:
        number: place in the order of the sender, from 0.
        pickled: the value.
        pictures: which the receiver does not hold yet.
        forgotten: names of pictures that the receiver holds and may forget, because no later packet relies on them.
    """

    number: int
    pickled: bytes
    pictures: tuple[Picture, ...]
    forgotten: tuple[PictureName, ...]


def show_pictures(messages: Iterable[Message]) -> bool:
    """Return whether messages have pictures."""
    contents = (message.get("content") for message in messages)
    return any(is_picture_part(part) for content in contents if isinstance(content, list | tuple) for part in content)


@define(eq=False)
class PacketSender:
    """
    Packs values for one receiver, and knows which pictures that holds.

    Attributes:
        max_bytes: of the pictures that the receiver holds between two packets: the ones that were in the last packets.
        num_packets: so far.
        num_sent: pictures whose bytes were in packets.
        num_sent_bytes: bytes of these.
    """

    max_bytes: int = _MAX_BYTES
    num_packets: int = field(default=0, init=False)
    num_sent: int = field(default=0, init=False)
    num_sent_bytes: int = field(default=0, init=False)
    _held: SizedCache[PictureName, None] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._held = SizedCache(self.max_bytes)

    def pack(self, value: T) -> Packet[T]:
        """Return the next packet."""
        file = io.BytesIO()
        pickler = _NamingPickler(file)
        pickler.dump(value)
        new = [picture for name, picture in pickler.named.items() if name not in self._held]
        for name in pickler.named:
            self._held.get(name)  # before the new ones, which could remove a picture that is used here
        forgotten = [name for each in new for name in self._held.put(each.name, None, len(each.data))]
        self.num_sent += len(new)
        self.num_sent_bytes += sum(len(picture.data) for picture in new)
        number, self.num_packets = self.num_packets, self.num_packets + 1
        return Packet(number=number, pickled=file.getvalue(), pictures=tuple(new), forgotten=tuple(forgotten))


@define(eq=False)
class PacketReceiver:
    """
    Unpacks the packets of one sender.

    Attributes:
        bytes_in: of all packets so far, pictures included.
        picture_bytes_in: of the pictures that came in them.
    """

    bytes_in: int = field(default=0, init=False)
    picture_bytes_in: int = field(default=0, init=False)
    _held: dict[PictureName, _Held] = field(factory=dict, init=False)
    _next: int = field(default=0, init=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pictures that it holds, without their URLs."""
        return sum(len(held.picture.data) for held in self._held.values())

    def unpack(self, packet: Packet[T]) -> T:
        """Return the value of the next packet; `ValueError` for another one."""
        if packet.number != self._next:
            raise ValueError(f"packet {packet.number} came before packet {self._next}")
        num_picture_bytes = sum(len(picture.data) for picture in packet.pictures)
        self.picture_bytes_in += num_picture_bytes
        self.bytes_in += num_picture_bytes + len(packet.pickled)
        self._held |= {picture.name: _Held(picture) for picture in packet.pictures}
        try:
            return cast("T", _NamedUnpickler(io.BytesIO(packet.pickled), self._held).load())
        finally:
            for name in packet.forgotten:
                del self._held[name]
            self._next += 1


@define(eq=False)
class _Held:
    """A picture, and its URL if a value had it: all values of a process share one text."""

    picture: Picture
    _url: str = ""

    @property
    def url(self) -> str:
        if not self._url:
            self._url = _url_of(self.picture)
        return self._url


class _NamingPickler(pickle.Pickler):
    """Writes names of pictures: whether the place has a URL, and the key and media type."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.named: dict[PictureName, Picture] = {}

    def persistent_id(self, value: Any) -> tuple[bool, PictureName] | None:
        is_url = type(value) is str and value.startswith(_URL)
        picture = _urls.read(value) if is_url else value
        if not isinstance(picture, Picture):
            return None
        self.named.setdefault(picture.name, picture)
        return is_url, picture.name


class _NamedUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, held: dict[PictureName, _Held]) -> None:
        super().__init__(file)
        self._pictures = held

    def persistent_load(self, pid: tuple[bool, PictureName]) -> str | Picture:
        is_url, name = pid
        held = self._pictures[name]
        return held.url if is_url else held.picture


@define(eq=False)
class _Urls:
    """
    The pictures of URLs that this process has sent lately: to decode one takes as long as to send it.

    Only a URL that `picture_part` writes has one, so that the receiver can write it again.
    """

    _read: SizedCache[str, Picture | None] = field(factory=lambda: SizedCache(_MAX_URL_CHARACTERS))

    def read(self, url: str) -> Picture | None:
        if url in self._read:
            return self._read.get(url)
        picture = _read_url(url)
        self._read.put(url, picture, len(url))
        return picture


_urls: Final = _Urls()


def _read_url(url: str) -> Picture | None:
    try:
        picture = read_picture_part({"type": "image_url", "image_url": {"url": url}})
    except DataError:  # a text that begins as a URL does, or a picture that its reader will refuse
        return None
    return picture if _url_of(picture) == url else None


def _url_of(picture: Picture) -> str:
    part: Any = picture_part(picture)
    url: str = part["image_url"]["url"]
    return url
