"""Weights live as long as their context: cancelling or killing either end leaves no memory and no file behind."""

import asyncio
import gc
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from transport_peer import TRANSPORTS, format_offer, parse_offer, summarize

from turnwise.errors import EngineError
from turnwise.protocols.weights import TensorSpec
from turnwise.weights.sources import as_numpy, source_of
from turnwise_testing.checks.transport import ReceivingEngine, assert_same, carry, some_weights, within
from turnwise_weight_transports.config import BucketConfig, DiskConfig
from turnwise_weight_transports.disk import DiskTransport
from turnwise_weight_transports.shm import SharedMemoryTransport


def segments_of(manifest):
    return [Path("/dev/shm", name) for name in manifest.locator["segments"]]


def send_line(process, line):
    process.stdin.write(line)
    process.stdin.flush()


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def wait_until_gone(paths):
    """Wait for the resource tracker of a killed process, by polling because it signals nothing."""
    deadline = time.monotonic() + 600
    while any(path.exists() for path in paths):
        assert time.monotonic() < deadline, "the segments outlived their publisher"
        time.sleep(0.01)


SLOW = {"gloo": [pytest.mark.slow]}  # its peers import torch


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, [])) for name in sorted(TRANSPORTS)])
def test_weights_reach_other_processes(name, tmp_path, start_peer):
    """Two replicas in separate processes receive every bit of the weights."""
    readers = [start_peer(name, "read", tmp_path) for _ in range(2)]
    received = []

    async def scenario():
        async with TRANSPORTS[name](tmp_path).publish(7, tuple(some_weights(3).items()), 2) as manifest:
            for reader in readers:
                send_line(reader, format_offer(manifest))
            received.extend([json.loads(await asyncio.to_thread(reader.stdout.readline)) for reader in readers])

    within(scenario(), 120)
    assert received == [summarize(7, some_weights(3))] * 2


class BlockedSource:
    """A source of three vectors. It sets `reached` when the first is copied, and yields the others when released."""

    specs = tuple(TensorSpec(name, (256,), "float32") for name in "abc")

    def __init__(self):
        self.reached, self.released = threading.Event(), threading.Event()

    def __iter__(self):
        yield "a", np.zeros(256, np.float32)
        self.reached.set()
        assert self.released.wait(30)
        yield "b", np.zeros(256, np.float32)
        yield "c", np.zeros(256, np.float32)


@pytest.mark.parametrize("name", ["shm", "disk"])
def test_a_cancelled_publishing_frees_what_its_thread_still_writes(name, tmp_path, segments):
    """The thread writes another bucket after the cancellation, and that bucket is freed too."""
    source = BlockedSource()

    async def publish():
        async with TRANSPORTS[name](tmp_path).publish(1, source, 1):
            raise AssertionError("it was published")

    async def scenario():
        task = asyncio.ensure_future(publish())
        assert await asyncio.to_thread(source.reached.wait, 30)
        assert [path for path in [*segments, *tmp_path.iterdir()] if path.exists()]
        task.cancel()
        for _ in range(20):  # deliver the cancellation before the thread ends, so that freeing too early would show
            await asyncio.sleep(0)
        source.released.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    within(scenario())
    assert len(segments) == (3 if name == "shm" else 0)
    assert [path for path in [*segments, *tmp_path.iterdir()] if path.exists()] == []


@pytest.mark.parametrize("name", ["shm", "disk"])
def test_an_error_in_the_context_frees_the_weights(name, tmp_path, segments):
    """The error propagates unchanged."""

    async def scenario():
        async with TRANSPORTS[name](tmp_path).publish(1, some_weights(), 1):
            assert [path for path in [*segments, *tmp_path.iterdir()] if path.exists()]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        within(scenario())
    assert [path for path in [*segments, *tmp_path.iterdir()] if path.exists()] == []


@pytest.mark.parametrize("name", ["shm", "disk"])
def test_two_versions_can_be_published_at_once(name, tmp_path):
    """Leaving one context does not free the weights of the other."""
    transport, engine = TRANSPORTS[name](tmp_path), ReceivingEngine()

    async def scenario():
        async with transport.publish(1, some_weights(1), 1) as first:
            async with transport.publish(1, some_weights(2), 1) as second:
                await transport.apply(engine, second)
                assert_same(some_weights(2), engine.weights)
            await transport.apply(engine, first)
            assert_same(some_weights(1), engine.weights)

    within(scenario())


def test_a_mapped_segment_outlives_its_context_and_cannot_be_written():
    """A replica that still reads keeps its map, and cannot change the weights of other replicas."""
    kept = {}

    class KeepingEngine(ReceivingEngine):
        async def update_weights(self, weights, version):
            kept.update(weights)

    async def scenario():
        await carry(SharedMemoryTransport(), [KeepingEngine()], some_weights(), 1)

    within(scenario())
    assert_same(some_weights(), kept)
    with pytest.raises(ValueError, match="read-only"):
        kept["embed.weight"][0] = 1


@pytest.mark.own_process
@pytest.mark.parametrize("name", ["shm", "disk"])
def test_updates_leak_neither_descriptors_nor_maps(name, tmp_path, segments):
    """After many versions the process has the same number of open files as after one, and maps no segment."""

    def num_descriptors():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    async def update(version):
        await carry(TRANSPORTS[name](tmp_path), [ReceivingEngine()], some_weights(version), version)

    within(update(1))
    before = num_descriptors()
    for version in range(2, 12):
        within(update(version))
    maps = Path("/proc/self/maps").read_text()

    assert num_descriptors() == before
    assert not any(path.name in maps for path in segments)


def test_kept_files_are_ordinary_safetensors(tmp_path):
    """`keep` keeps them, for inspection or as a checkpoint."""

    async def scenario():
        async with DiskTransport(DiskConfig(directory=tmp_path, keep=True)).publish(1, some_weights(), 1):
            pass

    within(scenario())
    (folder,) = tmp_path.iterdir()
    read = {name: as_numpy(array) for name, array in source_of(folder)}
    assert_same({name: some_weights()[name] for name in sorted(some_weights())}, {n: read[n] for n in sorted(read)})


def test_a_folder_has_its_name_only_when_it_is_complete(tmp_path):
    """Until the last bucket is written, the files are in a hidden folder."""
    source, seen = BlockedSource(), []

    async def scenario():
        async with asyncio.timeout(30):
            transport = DiskTransport(DiskConfig(bucket_bytes=512, directory=tmp_path))
            context = transport.publish(1, source, 1)
            publishing = asyncio.ensure_future(context.__aenter__())
            assert await asyncio.to_thread(source.reached.wait, 30)
            seen.extend(path.name for path in tmp_path.iterdir())
            source.released.set()
            manifest = await publishing
            assert [str(path.parent) for path in map(Path, manifest.locator["files"])] == [str(*tmp_path.iterdir())] * 3
            await context.__aexit__(None, None, None)

    within(scenario())
    assert [name.startswith(".") for name in seen] == [True]


@pytest.mark.parametrize("victim", ["reader", "none"])
def test_a_killed_reader_does_not_unlink_the_segments(victim, start_peer):
    """Other readers can still map them, and leaving the context unlinks them."""
    reader, engine = start_peer("shm", "read-one"), ReceivingEngine()

    async def scenario():
        transport = SharedMemoryTransport(BucketConfig(bucket_bytes=512, checksum="crc32"))
        async with transport.publish(1, tuple(some_weights().items()), 2) as manifest:
            send_line(reader, format_offer(manifest))
            assert await asyncio.to_thread(reader.stdout.readline) == "one weight is read\n"
            if victim == "reader":
                kill(reader)
            await transport.apply(engine, manifest)
        assert not any(path.exists() for path in segments_of(manifest))

    within(scenario())
    assert_same(some_weights(), engine.weights)


def test_segments_of_a_killed_publisher_are_unlinked(start_peer):
    """A later reader receives an error of one line."""
    publisher = start_peer("shm", "publish")
    manifest = parse_offer(publisher.stdout.readline())
    assert all(path.exists() for path in segments_of(manifest))
    kill(publisher)
    wait_until_gone(segments_of(manifest))
    with pytest.raises(EngineError, match="cannot read weights from /dev/shm: No such file"):
        asyncio.run(SharedMemoryTransport().apply(ReceivingEngine(), manifest))


def test_segments_of_a_publisher_killed_while_it_writes_are_unlinked(start_peer):
    """The publisher's memory map lists the segments, because nothing is published yet."""
    publisher = start_peer("shm", "publish-slowly")
    assert publisher.stdout.readline() == "the first bucket is written\n"
    maps = Path(f"/proc/{publisher.pid}/maps").read_text()
    paths = {Path(line.split()[-1]) for line in maps.splitlines() if "/dev/shm/turnwise_" in line}
    assert paths
    assert all(path.exists() for path in paths)
    kill(publisher)
    wait_until_gone(paths)


def test_files_of_a_publisher_killed_while_it_writes_are_hidden(tmp_path, start_peer):
    """They stay in a hidden folder, and the next version is published beside them."""
    publisher = start_peer("disk", "publish-slowly", tmp_path)
    assert publisher.stdout.readline() == "the first bucket is written\n"
    kill(publisher)
    assert [path.name.startswith(".") for path in tmp_path.iterdir()] == [True]

    engine = ReceivingEngine()

    async def scenario():
        await carry(TRANSPORTS["disk"](tmp_path), [engine], some_weights(), 1)

    within(scenario())
    assert_same(some_weights(), engine.weights)
