"""Options of the transports."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from attrs import field, frozen, validators

Checksum = Literal["none", "crc32", "xxh3"]


@frozen(kw_only=True)
class BucketConfig:
    """
    How weights are cut into pieces. One weight never lies in two of them.

    Attributes:
        bucket_bytes: most bytes of a piece; a larger weight is a piece of its own.
        checksum: what each piece is checked with when it is read; `none` trusts the memory that it came through.
    """

    bucket_bytes: int = field(default=64 * 2**20, validator=validators.ge(1))
    checksum: Checksum = "none"


@frozen(kw_only=True)
class DiskConfig(BucketConfig):
    """
    Where files are written.

    Attributes:
        directory: a folder that trainer and replicas both see; None is the system's for temporary files.
        keep: leave the files of past versions; they are ordinary safetensors files.
    """

    directory: Path | None = None
    keep: bool = False


@frozen(kw_only=True)
class BroadcastConfig(BucketConfig):
    """
    How the processes of a broadcast meet.

    Attributes:
        host: address of the trainer, as replicas reach it.
        port: where they meet; 0 lets the system choose.
        timeout_s: longest wait for all of them, and for one piece.
    """

    host: str = "127.0.0.1"
    port: int = field(default=0, validator=[validators.ge(0), validators.le(65535)])
    timeout_s: float = field(default=120.0, validator=validators.gt(0))


@frozen(kw_only=True)
class CudaIpcConfig:
    """The transport has no options: weights are neither copied nor cut into pieces."""
