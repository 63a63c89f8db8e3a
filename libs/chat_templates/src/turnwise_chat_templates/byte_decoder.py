"""
Decodes the ids of byte-level tokenizers from a table of their bytes.

The tokenizer in Rust copies the text of each token and maps it to bytes again in every call. With a table, 200 ids take
about a third of the time, and each turn of an episode is decoded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ByteDecoder:
    """
    Keeps the bytes of each id that has occurred, for a tokenizer whose decoder is `ByteLevel`.

    An id keeps its text: tokens that are added later get new ids. Ids that no token has are decoded to nothing, as the
    tokenizer does, and are not kept, because a token that is added later may get them.

    Args:
        backend: the tokenizer of the library tokenizers.
    """

    def __init__(self, backend: Any) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._backend = backend
        # A plain dictionary: lookups in a subclass with `__missing__` are slower, and a turn needs some hundred.
        self._table: dict[int, bytes] = {}
        letters = bytes_to_unicode()  # type: ignore[no-untyped-call]  # transformers declares no types
        self._bytes = {letter: byte for byte, letter in letters.items()}

    @classmethod
    def of(cls, backend: Any) -> ByteDecoder | None:
        """Return the decoder of a tokenizer; None for one that does more than to join bytes."""
        if backend is None:
            return None
        from tokenizers.decoders import ByteLevel

        return cls(backend) if isinstance(backend.decoder, ByteLevel) else None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, with U+FFFD for bytes that are no UTF-8."""
        find = self._table.__getitem__
        try:
            joined = b"".join(map(find, token_ids))
        except KeyError:
            joined = b"".join([self._find(token_id) for token_id in token_ids])
        return joined.decode(errors="replace")

    def _find(self, token_id: int) -> bytes:
        value = self._table.get(token_id)
        if value is not None:
            return value
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        try:
            value = bytes([self._bytes[letter] for letter in token])
        except KeyError:  # an added token may have any text, which stays whole
            value = token.encode()
        self._table[token_id] = value
        return value
