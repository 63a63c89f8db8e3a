"""Options of the weight transports."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal, get_args

from attrs import field, frozen, validators

Checksum = Literal["none", "crc32", "xxh3"]


@frozen(kw_only=True)
class BucketConfig:
    """
    Size and checksum of buckets. A weight is never split between buckets.

    Attributes:
        bucket_bytes: most bytes of a bucket; a larger weight has a bucket alone.
        checksum: algorithm that verifies each received bucket; `none` trusts the memory and the network.
    """

    bucket_bytes: int = field(default=64 * 2**20, validator=validators.ge(1))
    checksum: Checksum = field(default="none", validator=validators.in_(get_args(Checksum)))


@frozen(kw_only=True)
class DiskConfig(BucketConfig):
    """
    Folder and lifetime of the files.

    Attributes:
        directory: a folder that trainer and replicas both see; null is the system's folder for temporary files.
        keep: keep the files of past versions; they are ordinary safetensors files.
    """

    directory: Path | None = None
    keep: bool = False


@frozen(kw_only=True)
class BroadcastConfig(BucketConfig):
    """
    Address and timeout of a broadcast.

    Attributes:
        host: address of the trainer, as replicas reach it. The trainer listens on this address alone.
        port: port of the trainer on which replicas join; 0 lets the system choose a free one.
        timeout_s: longest wait in seconds for all replicas to join, and for one bucket to arrive.
        trusted_network: allow a `host` that other machines reach. A broadcast is neither authenticated nor encrypted:
            every process that reaches it can read or replace the weights.
    """

    host: str = field(default="127.0.0.1", validator=validators.min_len(1))
    port: int = field(default=0, validator=[validators.ge(0), validators.le(65535)])
    timeout_s: float = field(default=120.0, validator=validators.gt(0))
    trusted_network: bool = field(default=False)

    @trusted_network.validator
    def _check_exposure(self, _attribute: object, trusted: bool) -> None:
        if not trusted and not _is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} can be reached by other machines, and a broadcast is neither authenticated nor"
                " encrypted; set trusted_network to true on a network that you trust, or use the transport ray or disk"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@frozen(kw_only=True)
class CudaIpcConfig:
    """No options: weights are neither copied nor packed into buckets."""
