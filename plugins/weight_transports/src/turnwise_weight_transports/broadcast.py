"""
Broadcasts weights from the trainer to all replicas at once: `gloo` between CPUs, `nccl` between GPUs.

Each version has a new process group, separate from the trainer's and the engines'. Its members are the replicas that
serve at that time, so a member that dies ends this version and no later one. A replica that loses its peers receives
an error from its source: its engine keeps the old weights, or reports that its weights are torn.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from attrs import define, field

from turnwise.errors import EngineError
from turnwise.protocols.weights import Weight, WeightManifest, WeightSource, WeightTarget, dtype_of
from turnwise.weights.sources import as_tensor, source_of
from turnwise_weight_transports.buckets import (
    Bucket,
    ReceivedSource,
    compute_checksum,
    fill_buckets,
    next_array,
    plan_buckets,
    unpack_bucket,
    verify_checksum,
)
from turnwise_weight_transports.config import BroadcastConfig

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch re-exports them implicitly

Backend = Literal["gloo", "nccl"]
_POLL_S = 0.005
_CONNECT_S = 10.0
"""Longest wait for a store that has just accepted a connection."""

_CANCELLED = "the broadcast of weights was cancelled before all replicas had joined"


@define(eq=False)
class BroadcastTransport:
    """The transports `gloo` and `nccl`. All replicas apply a version at the same time."""

    config: BroadcastConfig = field(factory=BroadcastConfig)
    backend: Backend = "gloo"

    @asynccontextmanager
    async def publish(self, version: int, weights: Iterable[Weight], num_readers: int) -> AsyncIterator[WeightManifest]:
        """Wait for the replicas and send in a thread, which ends before the context does."""
        source, config = source_of(weights), self.config
        stores = [await asyncio.to_thread(_open_store, config)]
        locator = {
            "host": config.host,
            "port": stores[0].port,
            "num_readers": num_readers,
            "backend": self.backend,
            "bucket_bytes": config.bucket_bytes,
            "checksum": config.checksum,
            "timeout_s": config.timeout_s,
        }
        manifest, left = WeightManifest(version=version, specs=source.specs, locator=locator), threading.Event()
        sending = asyncio.get_running_loop().run_in_executor(None, _send, stores, manifest, source, left)
        try:
            yield manifest
        finally:
            left.set()
            await sending

    async def apply(self, engine: WeightTarget, manifest: WeightManifest) -> None:
        """Join the broadcast, and let the engine read it as it arrives."""
        await engine.update_weights(ReceivedSource(manifest, partial(_receive, manifest)), manifest.version)

    async def close(self) -> None:
        """Do nothing: no group outlives its version."""


def _open_store(config: BroadcastConfig) -> TCPStore:
    """Listen for replicas on the configured address; torch would listen on every interface."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it implicitly

    timeout = timedelta(seconds=config.timeout_s)
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address[:2], family=family) as listener:
            store = TCPStore(
                config.host,
                listener.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                timeout=timeout,
                master_listen_fd=listener.fileno(),
            )
            listener.detach()  # the store closes it
            return store
    except (OSError, RuntimeError) as error:
        raise EngineError(
            f"cannot listen on {config.host}:{config.port} for the broadcast of weights: {_first_line(error)}; set"
            " weight_transport.port to a free port, or to 0"
        ) from error


def _send(stores: list[TCPStore], manifest: WeightManifest, source: WeightSource, left: threading.Event) -> None:
    """Send every bucket once all replicas have joined; send nothing when the publisher has left before that."""
    # The store closes with its last reference. The executor drops a task's arguments some time after its result is
    # there, and a replica that connected in between would wait for a store that never responds.
    store = stores.pop()
    deadline = time.monotonic() + manifest.locator["timeout_s"]
    while store.add("joined", 0) < manifest.locator["num_readers"]:
        if left.wait(_POLL_S) or time.monotonic() > deadline:
            store.set("cancelled", "1")
            return
    store.set("started", "1")
    group = None
    try:
        group = _connect_group(store, manifest.locator, rank=0, address=manifest.locator["host"])
        for index, (bucket, tensor) in enumerate(_pack(manifest, source)):
            if manifest.locator["checksum"] != "none":
                checksum = compute_checksum(tensor.cpu().numpy(), bucket, manifest.locator["checksum"])
                store.set(f"checksum {index}", str(checksum))
            _broadcast(group, tensor)
        left.wait()  # replicas may still read checksums from the store
    except RuntimeError:
        # A replica that dies breaks the group. Each replica reports its own outcome, so there is nothing to add.
        return
    finally:
        # The traceback of an error keeps this frame alive, which would keep the group open and the replicas waiting.
        del group


def _pack(manifest: WeightManifest, source: WeightSource) -> Iterator[tuple[Bucket, Tensor]]:
    """Yield each bucket as a tensor on the backend's device; the next bucket reuses its memory."""
    import torch

    buckets = plan_buckets(manifest.specs, manifest.locator["bucket_bytes"])
    if manifest.locator["backend"] == "gloo":
        buffer = np.zeros(_max_bytes(buckets), np.uint8)
        for bucket, filled in fill_buckets(buckets, source, lambda _bucket: buffer):
            yield bucket, torch.from_numpy(filled[: bucket.num_bytes])
        return
    on_device, weights = torch.zeros(_max_bytes(buckets), dtype=torch.uint8, device="cuda"), iter(source)
    for bucket in buckets:
        for spec, start in bucket.entries:
            tensor = as_tensor(next_array(weights, spec), torch).detach().to("cuda").contiguous()
            on_device[start : start + spec.num_bytes] = tensor.view(-1).view(torch.uint8)
        yield bucket, on_device[: bucket.num_bytes]


def _max_bytes(buckets: tuple[Bucket, ...]) -> int:
    return max((bucket.num_bytes for bucket in buckets), default=0)


def _connect_group(store: Store, locator: Mapping[str, Any], rank: int, address: str) -> Any:
    """
    Make a process group and wait until every member has made it.

    Gloo connects two members in one of them first. If that member has nothing to wait for, it would close its group
    while the other still connects, and the other would fail.
    """
    group = _make_group(store, locator, rank, address)
    if store.add("connected", 1) > locator["num_readers"]:
        store.set("all connected", "1")
    store.wait(["all connected"])
    return group


def _make_group(  # torch's stubs omit `broadcast` of these groups
    store: Store, locator: Mapping[str, Any], rank: int, address: str
) -> Any:
    """
    Make a process group without registering it, so that it replaces no default group of trainer or engine.

    With gloo this process listens on `address`; NCCL chooses its interface itself.
    """
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch re-exports it implicitly

    timeout = timedelta(seconds=locator["timeout_s"])
    prefixed, size = PrefixStore("group", store), locator["num_readers"] + 1
    if locator["backend"] == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout  # noqa: SLF001 - torch has no public name for it
        return dist.ProcessGroupNCCL(prefixed, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs omit its options
    gloo_options = gloo._Options()  # noqa: SLF001 - torch has no public names for these either
    gloo_options._timeout = timeout  # noqa: SLF001 - see above
    # Without a device, gloo listens on the address of the host's name.
    gloo_options._devices = [gloo.create_device(hostname=address)]  # noqa: SLF001 - see above
    return gloo(prefixed, rank, size, gloo_options)


def _broadcast(group: Any, tensor: Tensor) -> None:
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    group.broadcast([tensor], options).wait()


def _receive(manifest: WeightManifest) -> Iterator[Weight]:
    """
    Join the broadcast of a manifest and yield its weights as they arrive. A second call finds no broadcast to join.

    Raises:
        EngineError: the broadcast was cancelled or interrupted, or a bucket is damaged.
    """
    try:
        yield from _received_weights(manifest)
    except RuntimeError as error:
        backend = manifest.locator["backend"]
        raise EngineError(f"the broadcast of weights ({backend}) was interrupted: {_first_line(error)}") from error


def _received_weights(manifest: WeightManifest) -> Iterator[Weight]:
    import torch

    locator = manifest.locator
    store, rank, address = _join(locator)
    group = _connect_group(store, locator, rank, address)
    buckets = plan_buckets(manifest.specs, locator["bucket_bytes"])
    device = "cpu" if locator["backend"] == "gloo" else "cuda"
    buffer = torch.zeros(_max_bytes(buckets), dtype=torch.uint8, device=device)
    try:
        for index, bucket in enumerate(buckets):
            tensor = buffer[: bucket.num_bytes]
            _broadcast(group, tensor)
            if locator["checksum"] != "none":
                published = int(store.get(f"checksum {index}"))
                verify_checksum(tensor.cpu().numpy(), bucket, locator["checksum"], published)
            yield from unpack_bucket(bucket, tensor.numpy()) if device == "cpu" else _unpack_on_device(bucket, tensor)
    finally:
        del group  # for the reason in `_send`: the publisher would wait until its timeout


def _join(locator: Mapping[str, Any]) -> tuple[TCPStore, int, str]:
    """Join the broadcast; return its store, and this process's rank and address; `EngineError` when it has ended."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it implicitly

    connect_timeout = timedelta(seconds=min(locator["timeout_s"], _CONNECT_S))
    try:
        # TCPStore would retry a refused connection until its timeout, although an ended broadcast never listens again.
        with socket.create_connection((locator["host"], locator["port"]), locator["timeout_s"]) as connection:
            address = connection.getsockname()[0]
    except OSError as error:
        raise EngineError(f"the broadcast of weights has ended, or cannot be reached: {error}") from error
    store = TCPStore(locator["host"], locator["port"], is_master=False, timeout=connect_timeout)
    store.set_timeout(timedelta(seconds=locator["timeout_s"]))
    rank = store.add("joined", 1)
    deadline = time.monotonic() + locator["timeout_s"]
    try:
        while not store.check(["started"]):
            if store.check(["cancelled"]) or time.monotonic() > deadline:
                raise EngineError(_CANCELLED)
            time.sleep(_POLL_S)
    except RuntimeError as error:
        # The publisher's store closed before this process saw the key `cancelled`.
        raise EngineError(_CANCELLED) from error
    return store, rank, address


def _unpack_on_device(bucket: Bucket, tensor: Tensor) -> Iterator[Weight]:
    import torch

    for spec, start in bucket.entries:
        flat = tensor[start : start + spec.num_bytes]
        yield spec.name, flat.view(getattr(torch, dtype_of(spec.dtype).name)).reshape(spec.shape)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
