"""Carries weights through safetensors files in a folder that both ends see: slow and simple, and open to inspection."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar
from uuid import uuid4

import numpy as np
from attrs import define, field
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

from turnwise.errors import EngineError
from turnwise.protocols.weights import Weight, WeightManifest, WeightSource, WeightTarget
from turnwise.weights.finishing import finish_in_thread
from turnwise.weights.sources import source_of
from turnwise_weight_transports.buckets import (
    Bucket,
    Buffer,
    ReceivedSource,
    allocate_zeros,
    plan_buckets,
    store_buckets,
    unpack_bucket,
    verify_checksum,
)
from turnwise_weight_transports.config import DiskConfig


@define(eq=False)
class DiskTransport:
    """The transport `disk`."""

    config: DiskConfig = field(factory=DiskConfig)
    lasting: ClassVar[bool] = True

    @asynccontextmanager
    async def publish(self, version: int, weights: Iterable[Weight], num_readers: int) -> AsyncIterator[WeightManifest]:
        parent = self.config.directory or Path(tempfile.gettempdir())
        folder = parent / f"turnwise-weights-{version}-{uuid4().hex[:8]}"
        try:
            yield await finish_in_thread(partial(self._write, version, source_of(weights), folder))
        finally:
            if not self.config.keep:
                await finish_in_thread(partial(shutil.rmtree, folder, ignore_errors=True))

    async def apply(self, engine: WeightTarget, manifest: WeightManifest) -> None:
        """Let the engine read the files; `EngineError` when one is missing or damaged."""
        await asyncio.to_thread(_verify, manifest)
        await engine.update_weights(ReceivedSource(manifest, partial(_read, manifest)), manifest.version)

    async def close(self) -> None:
        """Do nothing: only the files that `keep` asks for outlive their context."""

    def _write(self, version: int, source: WeightSource, folder: Path) -> WeightManifest:
        """Write the files to a hidden folder, and rename it when they are complete."""
        unfinished = folder.with_name(f".{folder.name}.unfinished")

        def save(index: int, bucket: Bucket, buffer: Buffer) -> str:
            name = f"weights-{index:05}.safetensors"
            save_file(dict(unpack_bucket(bucket, buffer)), unfinished / name)
            return str(folder / name)

        try:
            unfinished.mkdir(parents=True)
            files, layout = store_buckets(source, self.config, allocate_zeros, save)
            os.replace(unfinished, folder)
        except (OSError, SafetensorError) as error:
            raise EngineError(
                f"cannot write weights to {str(folder.parent)!r}: {error}; free space there, or set"
                " weight_transport.directory to a writable folder"
            ) from error
        finally:
            # After the rename there is nothing left to remove.
            shutil.rmtree(unfinished, ignore_errors=True)
        return WeightManifest(version=version, specs=source.specs, locator={"files": files, **layout})


def _verify(manifest: WeightManifest) -> None:
    """Raise `EngineError` when a file is missing, damaged, or holds other weights than were published."""
    for (bucket, buffer), published in zip(_read_files(manifest), manifest.locator["checksums"], strict=True):
        verify_checksum(buffer, bucket, manifest.locator["checksum"], published)


def _read(manifest: WeightManifest) -> Iterator[Weight]:
    for bucket, buffer in _read_files(manifest):
        yield from unpack_bucket(bucket, buffer)


def _read_files(manifest: WeightManifest) -> Iterator[tuple[Bucket, Buffer]]:
    """Yield each bucket with the content of its file; `EngineError` for a file that cannot be read or was replaced."""
    buckets = plan_buckets(manifest.specs, manifest.locator["bucket_bytes"])
    for bucket, path in zip(buckets, manifest.locator["files"], strict=True):
        try:
            # `safetensors.numpy.load_file` cannot read float8.
            tensors = dict(deserialize(Path(path).read_bytes()))  # type: ignore[no-untyped-call]  # it has no stub
        except (OSError, SafetensorError) as error:
            raise EngineError(f"cannot read weights from {path!r}: {error}") from error
        sizes = {spec.name: (list(spec.shape), spec.num_bytes) for spec, _start in bucket.entries}
        if sizes != {name: (tensor["shape"], len(tensor["data"])) for name, tensor in tensors.items()}:
            raise EngineError(f"cannot read weights from {path!r}: it holds other weights than were published")
        buffer = allocate_zeros(bucket)
        for spec, start in bucket.entries:
            buffer[start : start + spec.num_bytes] = np.frombuffer(tensors[spec.name]["data"], np.uint8)
        yield bucket, buffer
