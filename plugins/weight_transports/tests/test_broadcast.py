"""Interrupted broadcasts: every engine keeps its weights, the publisher ends, and the next version arrives."""

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from torch.distributed import TCPStore
from transport_peer import format_offer, parse_offer

from turnwise.errors import EngineError
from turnwise.protocols.weights import TensorSpec
from turnwise_testing.checks.transport import ReceivingEngine, assert_same, carry, some_weights, within
from turnwise_weight_transports import broadcast
from turnwise_weight_transports.broadcast import BroadcastTransport
from turnwise_weight_transports.config import BroadcastConfig


def transport(**options):
    return BroadcastTransport(BroadcastConfig(**{"bucket_bytes": 512, "timeout_s": 60, **options}))


def engine_with_old_weights():
    engine = ReceivingEngine()
    engine.weights = {"old": np.ones(1)}
    return engine


async def error_of(awaitable):
    """Return the text of the `EngineError` that is raised."""
    with pytest.raises(EngineError) as caught:
        await awaitable
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.slow
def test_a_killed_publisher_interrupts_the_broadcast(start_peer):
    """The publisher is killed between two buckets, and the engine keeps its weights."""
    publisher, engine = start_peer("gloo", "publish-slowly"), engine_with_old_weights()
    manifest = parse_offer(publisher.stdout.readline())

    async def scenario():
        async with asyncio.TaskGroup() as group:
            task = group.create_task(error_of(transport().apply(engine, manifest)))
            assert await asyncio.to_thread(publisher.stdout.readline) == "the first bucket is written\n"
            os.kill(publisher.pid, signal.SIGKILL)
        assert "the broadcast of weights (gloo) was interrupted: " in task.result()

    within(scenario(), 90)
    assert list(engine.weights) == ["old"]


class GatedSource:
    """A source of two buckets, which calls `gate` between them."""

    specs = (TensorSpec("a", (1024,), "float32"), TensorSpec("b", (1024,), "float32"))

    def __init__(self, gate):
        self.gate = gate

    def __iter__(self):
        yield "a", np.zeros(1024, np.float32)
        self.gate()
        yield "b", np.zeros(1024, np.float32)


@pytest.mark.slow
def test_a_killed_reader_tears_no_other_replica(start_peer):
    """A reader is killed between two buckets. The survivor has the whole version or the old one."""
    reader, engine = start_peer("gloo", "read-one"), engine_with_old_weights()

    def kill_reader():
        assert reader.stdout.readline() == "one weight is read\n"
        os.kill(reader.pid, signal.SIGKILL)
        reader.wait()

    async def scenario():
        async with transport(timeout_s=5).publish(1, GatedSource(kill_reader), 2) as manifest:
            reader.stdin.write(format_offer(manifest))
            reader.stdin.flush()
            with suppress(EngineError):
                await transport().apply(engine, manifest)
        assert list(engine.weights) in (["old"], ["a", "b"])
        assert await carry(transport(), [engine], some_weights(), 2) == [None]

    within(scenario(), 90)
    assert_same(some_weights(), engine.weights)


def test_a_source_that_fails_interrupts_the_broadcast():
    """The publisher raises the source's error, and the engine keeps its weights."""
    engine = engine_with_old_weights()

    def fail():
        raise EngineError("the checkpoint is gone")

    async def scenario():
        with pytest.raises(EngineError, match="the checkpoint is gone"):
            async with transport().publish(1, GatedSource(fail), 1) as manifest:
                text = await error_of(transport().apply(engine, manifest))
        assert "the broadcast of weights (gloo) was interrupted: " in text

    within(scenario())
    assert list(engine.weights) == ["old"]


def test_damage_on_the_way_is_found(monkeypatch):
    """A bit flips after the checksum is computed, and the engine keeps its weights."""
    engine, send = engine_with_old_weights(), broadcast._broadcast

    def flip_and_send(group, tensor):
        if group.rank() == 0:
            tensor[0] ^= 1
        send(group, tensor)

    async def scenario():
        monkeypatch.setattr(broadcast, "_broadcast", flip_and_send)
        # The publisher ends when the reader leaves, long before this timeout.
        async with transport(checksum="xxh3", timeout_s=90).publish(1, some_weights(), 1) as manifest:
            text = await error_of(transport().apply(engine, manifest))
        assert "received weights are damaged: the xxh3 checksum of the bucket with embed.weight" in text

    within(scenario())
    assert list(engine.weights) == ["old"]


def test_no_member_of_a_group_uses_it_before_all_have_made_it(monkeypatch):
    """A member that is ready first would end its part, and break the connection that another still makes."""
    make, used, one_was_held = broadcast._make_group, threading.Event(), threading.Event()

    def make_slowly(store, locator, rank, address):
        group = make(store, locator, rank, address)
        if rank == 1:
            one_was_held.set()
            assert not used.wait(0.5)  # nobody uses it, so there is no event to wait for
        return group

    def send(group, tensor):
        used.set()
        return original(group, tensor)

    async def scenario():
        assert await carry(transport(), engines, some_weights(), 1) == [None, None]

    original, engines = broadcast._broadcast, [ReceivingEngine(), ReceivingEngine()]
    monkeypatch.setattr(broadcast, "_make_group", make_slowly)
    monkeypatch.setattr(broadcast, "_broadcast", send)
    within(scenario())
    assert one_was_held.is_set()
    assert used.is_set()


def test_the_publisher_stays_until_the_last_replica_has_read_its_checksum(monkeypatch):
    """A replica asks the publisher's store for a checksum after the bucket has arrived."""
    send, broadcast_bucket, ended, asked = broadcast._send, broadcast._broadcast, threading.Event(), []

    def send_and_tell(*arguments):
        send(*arguments)
        ended.set()

    def receive_and_wait(group, tensor):
        broadcast_bucket(group, tensor)
        if group.rank() == 1:
            asked.append(ended.wait(0.5))  # the publisher must not end, so there is no event to wait for

    async def scenario():
        monkeypatch.setattr(broadcast, "_send", send_and_tell)
        monkeypatch.setattr(broadcast, "_broadcast", receive_and_wait)
        assert await carry(transport(bucket_bytes=1 << 20, checksum="crc32"), [engine], some_weights(), 1) == [None]

    engine = ReceivingEngine()
    within(scenario())
    assert asked == [False]
    assert ended.is_set()
    assert_same(some_weights(), engine.weights)


@pytest.mark.parametrize("ends_by", ["leaving", "timeout"])
def test_a_broadcast_that_a_replica_misses_is_cancelled(ends_by):
    """Only one of two replicas joins before the publisher leaves, or before the timeout."""
    engine = engine_with_old_weights()
    timeout_s = 60 if ends_by == "leaving" else 2

    async def scenario():
        publisher = transport(timeout_s=timeout_s)
        async with asyncio.TaskGroup() as group, publisher.publish(1, some_weights(), 2) as manifest:
            task = group.create_task(error_of(publisher.apply(engine, manifest)))
            if ends_by == "timeout":
                await asyncio.wait([task])
            else:
                await asyncio.to_thread(wait_for_replica, manifest)
        assert task.result() == "the broadcast of weights was cancelled before all replicas had joined"

    within(scenario())
    assert list(engine.weights) == ["old"]


def wait_for_replica(manifest):
    """Wait until a replica has joined the broadcast."""
    store = TCPStore(manifest.locator["host"], manifest.locator["port"], is_master=False)
    while store.add("joined", 0) == 0:
        time.sleep(0.005)


def test_a_port_that_is_taken_is_named():
    """The error names the option to change."""

    async def scenario():
        with socket.socket() as listener:
            listener.bind(("", 0))
            listener.listen()
            port = listener.getsockname()[1]
            with pytest.raises(EngineError) as caught:
                async with transport(port=port).publish(1, some_weights(), 1):
                    raise AssertionError("it was published")
        text = str(caught.value)
        assert text.startswith(f"cannot listen on 127.0.0.1:{port} for the broadcast of weights: ")
        assert text.endswith("; set weight_transport.port to a free port, or to 0")
        assert "\n" not in text

    within(scenario())


def test_no_process_group_is_registered():
    """A broadcast leaves torch's default group to the trainer and the engine."""
    import torch.distributed as dist

    async def scenario():
        await carry(transport(), [ReceivingEngine()], some_weights(), 1)
        assert not dist.is_initialized()

    within(scenario())
