"""
Images in a context: runs of placeholder tokens, and the picture of each run.

A picture is named by the hash of its encoded bytes. These are kept as they came and never encoded again, so the
processor of a trainer computes the same pixels as the engine's. Nothing here decodes a picture.
"""

from __future__ import annotations

import hashlib

from attrs import Attribute, field, frozen

from turnwise.arrays import TokenArray, as_token_array


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
    picture: Picture

    @num_tokens.validator
    def _check_tokens(self, _attribute: Attribute[int], num_tokens: int) -> None:
        if self.start < 0 or num_tokens < 1:
            raise ValueError(f"a picture has {num_tokens} tokens from token {self.start}")

    @property
    def stop(self) -> int:
        """Index after its last placeholder."""
        return self.start + self.num_tokens


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
    pictures: tuple[PlacedPicture, ...] = field(converter=tuple)

    @pictures.validator
    def _check_places(self, _attribute: Attribute[object], pictures: tuple[PlacedPicture, ...]) -> None:
        last = 0
        for each in pictures:
            if each.start < last or each.stop > len(self.token_ids):
                raise ValueError(f"the picture of tokens {each.start} to {each.stop} overlaps, or is behind the end")
            last = each.stop

    def __len__(self) -> int:
        return len(self.token_ids)
