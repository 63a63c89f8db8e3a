"""
Contexts that a worker and a replica both hold, and the proof that they are equal.

A request contains only the tokens after a prefix that its replica holds. Both ends hash the ids that they hold, each id
once, and the replica continues a prefix only if the hashes are equal. They differ if a record leaves sampled tokens
out, if two requests of a record overlap, or if a lost channel leaves a request behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

import numpy as np
from attrs import define, field, frozen

from turnwise.media import Picture, PictureName
from turnwise.types import GenerateRequest, TokenArray

_PROOF_BYTES: Final = 16
_SPARE: Final = 1024
_NO_TOKENS: Final = np.empty(0, np.int32)


@frozen
class ProvedPrefix:
    """The first tokens of a context, which the replica holds: their number, and the hash of their ids."""

    num_tokens: int = 0
    proof: bytes = b""


def _start_hash(ids: TokenArray) -> blake2b:
    return blake2b(np.ascontiguousarray(ids).data, digest_size=_PROOF_BYTES)


@define(eq=False)
class SentContext:
    """
    The context of a trajectory on a replica, as its worker knows it: the ids of the last request, and its result.

    Attributes:
        request_id: of the last request.
        result: sampled ids; empty until they have come.
    """

    request_id: str
    _ids: TokenArray
    _hash: blake2b  # of `_ids`
    _address: int  # of `_ids`, if they belong to a record
    result: TokenArray = field(default=_NO_TOKENS)

    @classmethod
    def start(cls, request: GenerateRequest) -> SentContext:
        """Return the context after a request that is sent completely."""
        ids = _keep(request.token_ids)
        return cls(request.request_id, ids, _start_hash(ids), _find_address(ids))

    def advance(self, request: GenerateRequest) -> ProvedPrefix | None:
        """
        Make this the context after a further request, and return the prefix that need not be sent.

        Returns None, and changes nothing, if the request does not continue the last one.
        """
        ids, start = request.token_ids, len(self._ids)
        # A view of the same memory needs no comparison, because the memory of a record only grows. Writable ids belong
        # to no record, and have no address.
        address = _find_address(ids) if ids.base is self._ids.base else 0
        is_same = start <= len(ids) and (address or 1) == self._address
        if not is_same and not np.array_equal(ids[:start], self._ids):
            return None
        new = np.ascontiguousarray(ids[start:])
        num_kept = _count_common(new, self.result)
        self._hash.update(new[:num_kept].data)
        prefix = ProvedPrefix(start + num_kept, self._hash.digest())
        self._hash.update(new[num_kept:].data)
        self.request_id, self._ids, self.result = request.request_id, _keep(ids), _NO_TOKENS
        self._address = address or _find_address(ids)
        return prefix


def _keep(ids: TokenArray) -> TokenArray:
    """Return ids that stay as they were hashed: read-only ids belong to a record, which only grows."""
    return ids.copy() if ids.flags.writeable else ids


def _find_address(ids: TokenArray) -> int:
    """Return the address of read-only ids, and 0 for others."""
    return 0 if ids.flags.writeable or ids.base is None else int(ids.__array_interface__["data"][0])


def _count_common(ids: TokenArray, others: TokenArray) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(ids), len(others))
    if ids[:length].tobytes() == others[:length].tobytes():  # the usual case; a comparison of arrays takes longer
        return length
    return int((ids[:length] != others[:length]).argmax())


@define(eq=False)
class Context:
    """
    The token ids of one trajectory on a replica, in a buffer that grows.

    An engine may still read the ids of an ended request. So nothing up to the end of the last request is ever
    overwritten: a request continues the context from there or later, or starts another one.

    Attributes:
        request_id: of the last request, whose result the context takes.
        pictures: of the last request. They stay as long as the trajectory: its next turn shows them again, when others
            may have taken their place in a store.
    """

    request_id: str
    _ids: TokenArray
    _size: int
    _asked: int  # tokens of the last request
    _hash: blake2b  # of these
    pictures: Mapping[PictureName, Picture] = field(factory=dict, init=False)

    @classmethod
    def start(cls, request_id: str, ids: TokenArray) -> Context:
        """Return the context of a request that came completely."""
        buffer = np.empty(len(ids) + _SPARE, np.int32)
        buffer[: len(ids)] = ids
        return cls(request_id, buffer, len(ids), len(ids), _start_hash(ids))

    def advance(self, request_id: str, prefix: ProvedPrefix, new_ids: TokenArray) -> bool:
        """Continue a prefix by new ids; return False, and change nothing, if this context does not start with it."""
        if not self._asked <= prefix.num_tokens <= self._size:
            return False
        running = self._hash.copy()
        running.update(self._ids[self._asked : prefix.num_tokens].data)
        if running.digest() != prefix.proof:
            return False
        running.update(np.ascontiguousarray(new_ids).data)
        self._write(prefix.num_tokens, new_ids)
        self.request_id, self._asked, self._hash = request_id, self._size, running
        return True

    def add_result(self, request_id: str, ids: TokenArray) -> None:
        """Append sampled ids, unless another request has continued the context meanwhile."""
        if self.request_id == request_id:
            self._write(self._asked, ids)

    def view(self) -> TokenArray:
        """Return the ids up to the end of the last request; later changes of the context do not change them."""
        ids = self._ids[: self._asked]
        ids.flags.writeable = False
        return ids

    def _write(self, start: int, ids: TokenArray) -> None:
        """Replace everything after the first `start` tokens."""
        stop = start + len(ids)
        if stop > len(self._ids):
            # A new buffer of twice the size: views of the old one stay valid, and copies cost O(1) for each token.
            grown = np.empty(2 * stop, np.int32)
            grown[:start] = self._ids[:start]
            self._ids = grown
        self._ids[start:stop] = ids
        self._size = stop
