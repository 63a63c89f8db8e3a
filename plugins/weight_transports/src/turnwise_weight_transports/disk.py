"""Through safetensors files in a folder that both ends see: slow, simple, and the files are there to look at."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import numpy as np
from attrs import define, field, frozen
from safetensors.numpy import load_file, save_file

from turnwise.errors import EngineError
from turnwise.weight_sources import source_of
from turnwise.weights import Offer, TensorSpec, Weight, WeightSource, WeightTarget
from turnwise_weight_transports.buckets import Bucket, Bytes, buckets_of, check, checksum_of, fill, read
from turnwise_weight_transports.config import DiskConfig


@define(eq=False)
class DiskTransport:
    """The transport `disk`."""

    config: DiskConfig = field(factory=DiskConfig)

    @asynccontextmanager
    async def publish(self, version: int, weights: Iterable[Weight], num_readers: int) -> AsyncIterator[Offer]:
        """Write a folder for the version, which has its name only when all of it is written."""
        parent = self.config.directory or Path(tempfile.gettempdir())
        folder = parent / f"turnwise-weights-{version}-{uuid4().hex[:8]}"
        try:
            yield await asyncio.to_thread(self._write, version, source_of(weights), folder)
        finally:
            if not self.config.keep:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def apply(self, engine: WeightTarget, offer: Offer) -> None:
        """Let the engine read the files; `EngineError` when one is missing or damaged."""
        source = await asyncio.to_thread(_checked, offer)
        await engine.update_weights(source, offer.version)

    async def close(self) -> None:
        """Do nothing: only what `keep` keeps outlives its context."""

    def _write(self, version: int, source: WeightSource, folder: Path) -> Offer:
        specs, config = source.specs, self.config
        buckets = buckets_of(specs, config.bucket_bytes)
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        unfinished.mkdir(parents=True)
        try:
            files, checksums = [], []
            for number, (bucket, piece) in enumerate(zip(buckets, fill(buckets, source, _room), strict=True)):
                files.append(f"weights-{number:05}.safetensors")
                checksums.append(checksum_of(piece, bucket, config.checksum))
                save_file(dict(read(bucket, piece)), unfinished / files[-1])
            os.replace(unfinished, folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        place = {
            "files": [str(folder / name) for name in files],
            "bucket_bytes": config.bucket_bytes,
            "checksum": config.checksum,
            "checksums": checksums,
        }
        return Offer(version=version, specs=specs, place=place)


@frozen(eq=False)
class FilesSource:
    """The weights of an offer's files, read one file at a time."""

    offer: Offer

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every weight."""
        return self.offer.specs

    def __iter__(self) -> Iterator[Weight]:
        """Read each file."""
        for bucket, weights in self.files():
            for spec, _start in bucket.entries:  # files are sorted by name
                yield spec.name, weights[spec.name]

    def files(self) -> Iterator[tuple[Bucket, dict[str, np.ndarray]]]:
        """Yield each piece with the weights of its file; `EngineError` for a file that cannot be read."""
        buckets = buckets_of(self.offer.specs, self.offer.place["bucket_bytes"])
        for bucket, path in zip(buckets, self.offer.place["files"], strict=True):
            try:
                yield bucket, load_file(path)
            except Exception as error:  # safetensors has one error class of its own, and the system its own
                raise EngineError(f"cannot read weights from {path!r}: {error}") from error


def _checked(offer: Offer) -> FilesSource:
    source, kind = FilesSource(offer), offer.place["checksum"]
    for (bucket, weights), expected in zip(source.files(), offer.place["checksums"], strict=True):
        if {spec.name for spec, _start in bucket.entries} != set(weights):
            raise EngineError("weights arrived incomplete: a file does not hold what was published")
        if kind != "none":
            piece = _room(bucket)
            for spec, start in bucket.entries:
                piece[start : start + spec.num_bytes] = weights[spec.name].reshape(-1).view(np.uint8)
            check(piece, bucket, kind, expected)
    return source


def _room(bucket: Bucket) -> Bytes:
    # Zeros, so that the gaps between weights are the same at both ends.
    return np.zeros(bucket.num_bytes, np.uint8)
