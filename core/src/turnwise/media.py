"""
Images in a context: runs of placeholder tokens, and the picture of each run.

A picture is named by the hash of its encoded bytes. These are kept as they came and never encoded again, so the
processor of a trainer computes the same pixels as the engine's. Chat, engine and trainer decode them by
`decode_picture`, so all three refuse the same pictures. A process holds the bytes of a picture once, however many
records, requests and results refer to them.

Messages hold pictures as OpenAI's do: a part of the content is
``{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}``.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final
from weakref import WeakValueDictionary

from attrs import Attribute, field, frozen

from turnwise.arrays import TokenArray, as_token_array
from turnwise.errors import DataError

SUFFIXES: Final[Mapping[str, str]] = {
    "image/png": ".png",
    "image/jpeg": ".jpg",
    "image/webp": ".webp",
    "image/gif": ".gif",
    "image/bmp": ".bmp",
}
"""Endings of the names of files, by media type: the types that messages may have."""
MAX_PICTURE_BYTES: Final = 20 << 20
"""Largest encoded picture of a message, as in OpenAI's interface."""


_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_ORIENTATION: Final = 0x0112
"""Of EXIF: 1 is upright."""


PictureName = tuple[str, str]
"""Names a picture in every process: its key and its media type."""


@frozen(kw_only=True, eq=False)
class Picture:
    """
    An encoded picture.

    Attributes:
        data: the bytes of its file.
        media_type: of the bytes, such as `image/png`.
        key: SHA-256 of `data` in hexadecimal, which names it in records, requests and files.
    """

    data: bytes = field(repr=False)
    media_type: str
    key: str = field(init=False)

    @key.default
    def _hash(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def name(self) -> PictureName:
        return self.key, self.media_type

    @property
    def file_name(self) -> str:
        """Name of its file in a folder of results: the key and the usual ending of its type."""
        return self.key + SUFFIXES.get(self.media_type, ".bin")

    def __reduce__(self) -> tuple[Callable[[bytes, str], Picture], tuple[bytes, str]]:
        """Pickle so that the receiving process holds the bytes once, too."""
        return find_picture, (self.data, self.media_type)


_HELD: WeakValueDictionary[PictureName, Picture] = WeakValueDictionary()


def hold_once(picture: Picture) -> Picture:
    """Return the equal picture that the process holds already, or else this one, which it holds from now on."""
    return _HELD.setdefault(picture.name, picture)


def find_held(name: PictureName) -> Picture | None:
    """Return the picture of a name if any part of this process holds it."""
    return _HELD.get(name)


def find_picture(data: bytes, media_type: str) -> Picture:
    """Return the picture of some bytes; the process holds them once."""
    return hold_once(Picture(data=data, media_type=media_type))


def read_picture(data: bytes, name: str = "a picture") -> Picture:
    """
    Return the picture of the bytes of a file, whose type its first bytes tell.

    Raises:
        DataError: the file is empty, too large, or of no known type; the text begins with `name`.
    """
    if not data:
        raise DataError(f"{name} is empty")
    if len(data) > MAX_PICTURE_BYTES:
        raise DataError(f"{name} has {len(data)} bytes, more than {MAX_PICTURE_BYTES}")
    for media_type, (offset, signature) in _SIGNATURES.items():
        if data.startswith(signature, offset) and (media_type != "image/webp" or data.startswith(b"RIFF")):
            return find_picture(data, media_type)
    raise DataError(f"{name} is of no known type; known are {', '.join(SUFFIXES)}")


_SIGNATURES: Final[Mapping[str, tuple[int, bytes]]] = {
    "image/png": (0, b"\x89PNG\r\n\x1a\n"),
    "image/jpeg": (0, b"\xff\xd8\xff"),
    "image/webp": (8, b"WEBP"),
    "image/gif": (0, b"GIF8"),
    "image/bmp": (0, b"BM"),
}


def decode_picture(picture: Picture, max_pixels: int | None = None) -> Any:
    """
    Return a picture as pillow's image, decoded. pillow is no requirement of turnwise: a chat with pictures needs it.

    Args:
        picture: the picture.
        max_pixels: most pixels; None leaves only pillow's own limit.

    Raises:
        DataError: it has too many pixels, is broken or animated, or is not upright: libraries differ in whether they
            turn a picture by its EXIF orientation, so an engine and a trainer could see different pixels.
    """
    from PIL import Image, UnidentifiedImageError

    name = f"picture {picture.key[:12]} ({picture.media_type})"
    try:
        image = Image.open(io.BytesIO(picture.data), formats=_FORMATS)
        problem = _find_problem(image, max_pixels)
        if not problem:
            image.load()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        limit = "pillow allows" if max_pixels is None else f"the {max_pixels} of max_picture_pixels"
        raise DataError(f"{name} has more pixels than {limit}") from error
    except UnidentifiedImageError as error:  # whose text is the address of an object
        raise DataError(f"{name} is broken: its header cannot be read") from error
    except Exception as error:  # decoders raise anything on broken files
        raise DataError(f"{name} is broken: {' '.join(str(error).split()) or type(error).__name__}") from error
    if problem:
        raise DataError(f"{name} {problem}")
    return image


def _find_problem(image: Any, max_pixels: int | None) -> str:
    """Return why an image whose header is read cannot be used; empty if it can."""
    if max_pixels is not None and image.width * image.height > max_pixels:
        return f"has {image.width} x {image.height} pixels, more than the {max_pixels} of max_picture_pixels"
    if getattr(image, "n_frames", 1) > 1:
        return f"has {image.n_frames} frames; give one of them"
    turned = image.getexif().get(_ORIENTATION, 1)
    if turned not in (0, 1):
        return f"has the EXIF orientation {turned}: turn its pixels, and remove the mark"
    return ""


def picture_part(picture: Picture) -> dict[str, object]:
    """Return a picture as a part of the content of a message."""
    url = f"data:{picture.media_type};base64,{base64.b64encode(picture.data).decode('ascii')}"
    return {"type": "image_url", "image_url": {"url": url}}


def is_picture_part(part: object) -> bool:
    """Return whether a part of a content has the form of a picture, in any of the forms in use."""
    return isinstance(part, Mapping) and part.get("type") in ("image_url", "image")


def read_picture_part(part: object) -> Picture:
    """
    Return the picture of a part of the content of a message. Nothing is read from a network or a file.

    Raises:
        DataError: it has no `data:` URL in base64, or `read_picture` refuses its bytes.
    """
    held = part.get("image_url") if isinstance(part, Mapping) and part.get("type") == "image_url" else None
    url = held.get("url") if isinstance(held, Mapping) else held
    if not isinstance(url, str):
        raise DataError('a picture of a message needs the form {"type": "image_url", "image_url": {"url": "data:..."}}')
    head, comma, text = url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64") or not comma:
        shown = head[:60] if head.startswith("data:") else url[:60]
        raise DataError(
            f"a picture of a message is the URL {shown!r}; only data: URLs in base64 are taken, none is fetched"
        )
    if len(text) > 4 * (MAX_PICTURE_BYTES // 3 + 1):
        raise DataError(f"a picture of a message has more than {MAX_PICTURE_BYTES} bytes")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"a picture of a message is no base64: {error}") from None
    return read_picture(data, "a picture of a message")


@frozen(kw_only=True, eq=False)
class PlacedPicture:
    """
    A picture, and its placeholder tokens in a context.

    Attributes:
        start: index of its first placeholder.
        num_tokens: number of its placeholders, which follow one another.
        picture: the picture.
    """

    start: int
    num_tokens: int = field()
    picture: Picture = field(converter=hold_once)

    @num_tokens.validator
    def _check_tokens(self, _attribute: Attribute[int], num_tokens: int) -> None:
        if self.start < 0 or num_tokens < 1:
            raise ValueError(f"a picture has {num_tokens} tokens from token {self.start}")

    @property
    def stop(self) -> int:
        """Index after its last placeholder."""
        return self.start + self.num_tokens


def _as_tuple(pictures: Iterable[PlacedPicture]) -> tuple[PlacedPicture, ...]:
    return tuple(pictures)


@frozen(kw_only=True, eq=False)
class MediaTokens:
    """
    Ids with pictures, as a chat renders messages that have some.

    An agent gives them to `Episode.begin` and `Episode.observe` as they are. They are no array on purpose: code that
    cuts or joins ids would lose the pictures of their placeholders.

    Attributes:
        token_ids: (n,) int32, with the placeholders.
        pictures: in their order; they do not overlap.
    """

    token_ids: TokenArray = field(converter=as_token_array)
    pictures: tuple[PlacedPicture, ...] = field(converter=_as_tuple)

    @pictures.validator
    def _check_places(self, _attribute: Attribute[object], pictures: tuple[PlacedPicture, ...]) -> None:
        last = 0
        for each in pictures:
            if each.start < last or each.stop > len(self.token_ids):
                raise ValueError(f"the picture of tokens {each.start} to {each.stop} overlaps, or is behind the end")
            last = each.stop

    def __len__(self) -> int:
        return len(self.token_ids)
