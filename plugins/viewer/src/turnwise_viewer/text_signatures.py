"""
Signatures of texts: a search skips the groups of rows whose signatures show that no row has the text.

A signature is a bit array of an episode. Each three bytes of its texts in a row set the bit that their hash names. An
episode without one of the bits of a searched text does not have the text, and an episode with all of them may have it.
The bits are stored by hash and not by episode ("bit-sliced signature files", Faloutsos and Christodoulakis, 1984), so a
search reads one short slice for each three bytes of its text.

An episode of 1,000 tokens has 1 KiB of signature. Signatures are in a file without a name, which ends with the process.
"""

from __future__ import annotations

import math
import os
import tempfile
import weakref
from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa
from attrs import frozen
from numpy.typing import NDArray

_MIN_BITS, _MAX_BITS = 256, 65536
_BITS_PER_ROOT: Final = 64
"""Texts repeat more the longer they are: the number of bits grows with the root of the length, as distinct words do."""
_MAX_HASHES: Final = 16
"""Bits of a searched text that are looked at; more exclude hardly anything more."""
_FOLD: Final = 0x20
"""Letters of ASCII in upper and lower case differ in this bit; other bytes that it makes equal cost exactness only."""
_ODD_LETTERS: Final = ("\u017f".encode(), "\u212a".encode())
"""Letters outside of ASCII that a search without regard to case takes for `s` and `k`."""


@frozen
class _Block:
    """Place of a group in the file: `num_bits` slices of a bit per row."""

    start: int
    num_bits: int
    num_rows: int

    @property
    def slice_bytes(self) -> int:
        return -(-self.num_rows // 8)


class TextSignatures:
    """Signatures of groups of rows, added in order. One thread adds them, and others may read at the same time."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._blocks: list[_Block] = []
        self._end = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, texts: pa.Table) -> None:
        """Add the next group, by its columns of texts."""
        columns = [_text_bytes(chunk) for name in texts.column_names for chunk in [texts[name].combine_chunks()]]
        total = sum(int(offsets[-1] - offsets[0]) for _data, offsets in columns)
        num_bits = _number_of_bits(total / max(1, texts.num_rows))
        bits = np.zeros((texts.num_rows, num_bits), bool)
        for data, offsets in columns:
            _set_bits(bits, data, offsets)
        packed = np.packbits(bits.T, axis=1).tobytes()
        block = _Block(self._end, num_bits, texts.num_rows)
        if self._descriptor < 0:
            self._descriptor = self._create_file()
        os.pwrite(self._descriptor, packed, self._end)
        self._end += len(packed)
        self._blocks.append(block)  # last: a search that sees it finds its bytes

    def may_have(self, group: int, text: str) -> NDArray[np.bool_]:
        """Return (rows,) whether each row of a group may have a text, compared without regard to case."""
        block = self._blocks[group]
        found = np.full(block.slice_bytes, 255, np.uint8)
        for number in _hashes_of(text, block.num_bits):
            start = block.start + number * block.slice_bytes
            found &= np.frombuffer(os.pread(self._descriptor, block.slice_bytes, start), np.uint8)
        return np.unpackbits(found, count=block.num_rows).astype(bool)

    def _create_file(self) -> int:
        descriptor, name = tempfile.mkstemp(prefix="turnwise-search-")
        os.unlink(name)
        weakref.finalize(self, os.close, descriptor)
        return descriptor


def _number_of_bits(mean_bytes: float) -> int:
    wanted = _BITS_PER_ROOT * math.sqrt(mean_bytes)
    return min(_MAX_BITS, max(_MIN_BITS, 2 ** math.ceil(math.log2(wanted)) if wanted > 1 else _MIN_BITS))


def _text_bytes(texts: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Return the bytes of texts, and (rows + 1,) where each starts and the last ends; null is an empty text."""
    _valid, offsets, data = texts.cast(pa.binary()).buffers()
    starts = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8), starts


def _set_bits(bits: NDArray[np.bool_], data: NDArray[np.uint8], offsets: NDArray[np.int32]) -> None:
    if any(_has_sequence(data, letter) for letter in _ODD_LETTERS):
        bits[:] = True
        return
    hashes = _hash(data, bits.shape[1])
    for row, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        if stop - start > 2:
            bits[row] |= np.bincount(hashes[start : stop - 2], minlength=bits.shape[1]).astype(bool)


def _has_sequence(data: NDArray[np.uint8], sequence: bytes) -> bool:
    places = np.flatnonzero(data[: len(data) - len(sequence) + 1] == sequence[0])
    for index, value in enumerate(sequence[1:], 1):
        places = places[data[places + index] == value]
    return len(places) > 0


def _hash(data: NDArray[np.uint8], num_bits: int) -> NDArray[np.uint16]:
    """Return (bytes - 2,) the number of the bit for each three bytes in a row."""
    folded = (data | _FOLD).astype(np.uint16)
    mixed = folded[:-2] * np.uint16(40503)
    mixed ^= folded[1:-1] * np.uint16(30347)
    mixed += folded[2:] * np.uint16(49157)
    mixed *= np.uint16(40503)
    hashes: NDArray[np.uint16] = mixed >> np.uint16(16 - int(math.log2(num_bits)))
    return hashes


def _hashes_of(text: str, num_bits: int) -> Iterator[int]:
    """Yield the bits of a text, from its parts in ASCII: other letters have no bit in common with their other case."""
    data = np.frombuffer(text.encode(), np.uint8)
    if len(data) < 3:
        return
    is_ascii = data < 128
    usable = is_ascii[:-2] & is_ascii[1:-1] & is_ascii[2:]
    numbers = np.unique(_hash(data, num_bits)[usable])
    yield from numbers[:: -(-len(numbers) // _MAX_HASHES) or 1].tolist()
