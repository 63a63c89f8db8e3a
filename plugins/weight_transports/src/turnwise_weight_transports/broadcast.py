"""
By broadcast from the trainer to all replicas at once: `gloo` between CPUs, `nccl` between GPUs.

Each version has a process group of its own, apart from any that trainer or engine have: members are whoever serves at
that time, and one that dies breaks off this version and no later one. A replica that loses its peers in the middle
gets an error from its source, so its engine keeps what it had, or says that it is torn.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Literal

import numpy as np
from attrs import define, field, frozen

from turnwise.errors import EngineError
from turnwise.weight_sources import as_tensor, source_of
from turnwise.weights import Offer, TensorSpec, Weight, WeightSource, WeightTarget, dtype_of
from turnwise_weight_transports.buckets import Bucket, buckets_of, check, checksum_of, expected, fill, read
from turnwise_weight_transports.config import BroadcastConfig

Backend = Literal["gloo", "nccl"]
_POLL_S = 0.005


@define(eq=False)
class BroadcastTransport:
    """The transports `gloo` and `nccl`. All replicas apply a version at the same time."""

    config: BroadcastConfig = field(factory=BroadcastConfig)
    backend: Backend = "gloo"

    @asynccontextmanager
    async def publish(self, version: int, weights: Iterable[Weight], num_readers: int) -> AsyncIterator[Offer]:
        """Wait for the replicas and send, beside the context; leaving it ends the sending."""
        source, config = source_of(weights), self.config
        store = await asyncio.to_thread(_open_store, config)
        place = {
            "host": config.host,
            "port": store.port,
            "num_readers": num_readers,
            "backend": self.backend,
            "bucket_bytes": config.bucket_bytes,
            "checksum": config.checksum,
            "timeout_s": config.timeout_s,
        }
        offer, given_up = Offer(version=version, specs=source.specs, place=place), threading.Event()
        sending = asyncio.get_running_loop().run_in_executor(None, _send, store, offer, source, given_up)
        try:
            yield offer
        finally:
            given_up.set()
            await sending

    async def apply(self, engine: WeightTarget, offer: Offer) -> None:
        """Join the broadcast, and let the engine read it as it arrives."""
        await engine.update_weights(BroadcastSource(offer), offer.version)

    async def close(self) -> None:
        """Do nothing: no group outlives its version."""


def _open_store(config: BroadcastConfig) -> Any:
    dist: Any = importlib.import_module("torch.distributed")

    timeout = timedelta(seconds=config.timeout_s)
    return dist.TCPStore(config.host, config.port, is_master=True, wait_for_workers=False, timeout=timeout)


def _send(store: Any, offer: Offer, source: WeightSource, given_up: threading.Event) -> None:
    """Send every piece, unless the replicas have all answered before they have all come."""
    place = offer.place
    until = time.monotonic() + place["timeout_s"]
    while store.add("joined", 0) < place["num_readers"]:
        if given_up.wait(_POLL_S) or time.monotonic() > until:
            store.set("left", b"1")
            return
    store.set("begin", b"1")
    group = _group(store, offer, rank=0)
    try:
        for number, (bucket, piece) in enumerate(_pieces(offer, source)):
            if place["checksum"] != "none":
                digest = checksum_of(piece.cpu().numpy(), bucket, place["checksum"])
                store.set(f"checksum {number}", str(digest))
            _broadcast(group, piece)
    except RuntimeError:
        # A replica that died breaks the group. What became of each is in what it answered, or did not.
        return
    finally:
        # A frame that an error keeps would keep the group too, and the replicas would wait for what never comes.
        del group


def _pieces(offer: Offer, source: WeightSource) -> Iterator[tuple[Bucket, Any]]:
    """Yield each piece as a tensor where the backend sends from; its memory is used again for the next."""
    import torch

    buckets = buckets_of(offer.specs, offer.place["bucket_bytes"])
    if offer.place["backend"] == "gloo":
        room = np.zeros(_most_bytes(buckets), np.uint8)
        for bucket, _piece in zip(buckets, fill(buckets, source, lambda _bucket: room), strict=True):
            yield bucket, torch.from_numpy(room[: bucket.num_bytes])
        return
    on_device, weights = torch.zeros(_most_bytes(buckets), dtype=torch.uint8, device="cuda"), iter(source)
    for bucket in buckets:
        for spec, start in bucket.entries:
            tensor = as_tensor(expected(weights, spec), torch).detach().to("cuda").contiguous()
            on_device[start : start + spec.num_bytes] = tensor.view(-1).view(torch.uint8)
        yield bucket, on_device[: bucket.num_bytes]


def _most_bytes(buckets: tuple[Bucket, ...]) -> int:
    return max((bucket.num_bytes for bucket in buckets), default=0)


def _group(store: Any, offer: Offer, rank: int) -> Any:
    """Return a process group that is registered nowhere, so that it is in nobody's way."""
    dist: Any = importlib.import_module("torch.distributed")

    timeout = timedelta(seconds=offer.place["timeout_s"])
    prefixed, size = dist.PrefixStore("group", store), offer.place["num_readers"] + 1
    if offer.place["backend"] == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout  # noqa: SLF001 - torch has no other name for it
        return dist.ProcessGroupNCCL(prefixed, rank, size, options)
    return dist.ProcessGroupGloo(prefixed, rank, size, timeout)


def _broadcast(group: Any, tensor: Any) -> None:
    dist: Any = importlib.import_module("torch.distributed")

    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    group.broadcast([tensor], options).wait()


@frozen(eq=False)
class BroadcastSource:
    """The weights of a broadcast, received while they are iterated over; a second iteration finds nobody."""

    offer: Offer

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every weight."""
        return self.offer.specs

    def __iter__(self) -> Iterator[Weight]:
        """Receive piece after piece; `EngineError` when the broadcast breaks off or a piece is damaged."""
        place = self.offer.place
        try:
            yield from self._received()
        except RuntimeError as error:
            text = f"the broadcast of weights ({place['backend']}) broke off: {str(error).splitlines()[0]}"
            raise EngineError(text) from error

    def _received(self) -> Iterator[Weight]:
        import torch

        place = self.offer.place
        store, rank = _join(place)
        group = _group(store, self.offer, rank)
        buckets = buckets_of(self.offer.specs, place["bucket_bytes"])
        device = "cpu" if place["backend"] == "gloo" else "cuda"
        room = torch.zeros(_most_bytes(buckets), dtype=torch.uint8, device=device)
        for number, bucket in enumerate(buckets):
            piece = room[: bucket.num_bytes]
            _broadcast(group, piece)
            if place["checksum"] != "none":
                published = int(store.get(f"checksum {number}"))
                check(piece.cpu().numpy(), bucket, place["checksum"], published)
            yield from read(bucket, piece.numpy()) if device == "cpu" else _on_device(bucket, piece)


def _join(place: Any) -> tuple[Any, int]:
    """Come to the meeting and return the store and this process's rank; `EngineError` when it was called off."""
    dist: Any = importlib.import_module("torch.distributed")

    timeout = timedelta(seconds=place["timeout_s"])
    try:
        # The store would go on knocking at a door that nobody will open until the time is over.
        socket.create_connection((place["host"], place["port"]), place["timeout_s"]).close()
    except OSError as error:
        raise EngineError(f"the broadcast of weights has ended, or cannot be reached: {error}") from error
    store = dist.TCPStore(place["host"], place["port"], is_master=False, timeout=timeout)
    rank = store.add("joined", 1)
    until = time.monotonic() + place["timeout_s"]
    while not store.check(["begin"]):
        if store.check(["left"]) or time.monotonic() > until:
            raise EngineError("the broadcast of weights was called off: not every replica came")
        time.sleep(_POLL_S)
    return store, rank


def _on_device(bucket: Bucket, tensor: Any) -> Iterator[Weight]:
    import torch

    for spec, start in bucket.entries:
        flat = tensor[start : start + spec.num_bytes]
        yield spec.name, flat.view(getattr(torch, dtype_of(spec.dtype).name)).reshape(spec.shape)
