"""Limits of a request, which follow from the context of the model and are checked before the work that they bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Self

import numpy as np
from attrs import frozen

from turnwise.media import MAX_PICTURE_BYTES, Picture
from turnwise_gateway.refusal import CallRefusedError

CheckPicture = Callable[[Picture], object]
"""Raises `DataError` or `ConfigError` for a picture that a run cannot show."""
MAX_INLINE_BYTES: Final = 64 * 1024
"""A body of this size is read in about a millisecond, which is no more than a change of threads may take."""
MAX_COUNTED_BYTES: Final = 1024 * 1024
"""The values in a body of this size are counted in about a millisecond."""
_FREE_BYTES: Final = 1024 * 1024
"""Bytes for tools, and for fields that the model does not see."""
_BYTES_PER_TOKEN: Final = 64
"""A token of a text has some 4 bytes, and several times more where it is escaped or the context has lost reasoning."""
_BYTES_PER_PICTURE: Final = MAX_PICTURE_BYTES * 4 // 3 + 1024
"""In base64."""
_FREE_VALUES: Final = 20_000
_VALUES_PER_TOKEN: Final = 8
_FREE_ITEMS: Final = 1_000
_IS_SEPARATOR: Final = np.isin(np.arange(256), list(b",[{"))


@frozen
class PictureLimits:
    """
    Limits of the pictures of a session.

    Attributes:
        check: of each picture.
        most: pictures of a record.
        hosts: of URLs that are fetched.
    """

    check: CheckPicture
    most: int
    hosts: tuple[str, ...] = ()


@frozen(kw_only=True)
class CallLimits:
    """
    Limits of the requests of a session.

    Attributes:
        max_tokens: most tokens of the context.
        num_bytes: most bytes of a body.
        num_values: most values in its JSON.
        num_items: most messages and tools together; each takes a token at least.
        pictures: limits of pictures; None for a run that takes none.
    """

    max_tokens: int
    num_bytes: int
    num_values: int
    num_items: int
    pictures: PictureLimits | None = None

    @classmethod
    def of_context(cls, max_tokens: int, pictures: PictureLimits | None = None) -> Self:
        """Return the limits of a model whose context has `max_tokens`."""
        num_picture_bytes = 0 if pictures is None else pictures.most * _BYTES_PER_PICTURE
        return cls(
            max_tokens=max_tokens,
            num_bytes=_FREE_BYTES + _BYTES_PER_TOKEN * max_tokens + num_picture_bytes,
            pictures=pictures,
            num_values=_FREE_VALUES + _VALUES_PER_TOKEN * max_tokens,
            num_items=_FREE_ITEMS + max_tokens,
        )

    def find_excess(self, num_bytes: int) -> CallRefusedError | None:
        """Return the refusal of a body of this size; None if the context can hold it."""
        if num_bytes <= self.num_bytes:
            return None
        return self._refusal(f"the body has more than {self.num_bytes} bytes", num_bytes // _BYTES_PER_TOKEN)

    def check_values(self, body: bytes) -> None:
        """Refuse a body with too many JSON values; they are counted by their separators, before any is built."""
        # Texts have commas and brackets too, so the exact count is needed for few bodies.
        if len(body) <= self.num_values or sum(body.count(each) for each in (b",", b"[", b"{")) <= self.num_values:
            return
        if (number := _count_separators(body)) > self.num_values:
            raise self._refusal(f"the body has more than {self.num_values} JSON values", number)

    def check_items(self, num_items: int) -> None:
        """Refuse a call with this number of messages and tools if the context cannot hold them."""
        if num_items > self.num_items:
            raise self._refusal(f"the request has more than {self.num_items} messages and tools", num_items)

    def _refusal(self, reason: str, num_tokens: int) -> CallRefusedError:
        text = f"{reason}, and the context has {self.max_tokens} tokens"
        num_tokens = max(num_tokens, self.max_tokens + 1)
        return CallRefusedError("context_length_exceeded", text, num_tokens=num_tokens, max_tokens=self.max_tokens)


def _count_separators(body: bytes) -> int:
    """Return the number of separators outside of texts: as many as there are values, or more."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    codes = np.frombuffer(plain, np.uint8)
    # In a text, the number of quotes before is odd; 8 bits keep that.
    is_outside = np.cumsum(codes == ord('"'), dtype=np.uint8) % 2 == 0
    return int(np.count_nonzero(_IS_SEPARATOR[codes] & is_outside))
