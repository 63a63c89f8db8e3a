"""Between real processes: weights arrive, kills of either end leave the old weights and no memory behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from turnwise.errors import EngineError
from turnwise.testing.transport_suite import ReceivingEngine, assert_same, some_weights, within
from turnwise.weights import Offer, TensorSpec
from turnwise_weight_transports.broadcast import BroadcastTransport
from turnwise_weight_transports.config import BroadcastConfig, BucketConfig, CudaIpcConfig, DiskConfig
from turnwise_weight_transports.cuda_ipc import CudaIpcTransport
from turnwise_weight_transports.disk import DiskTransport
from turnwise_weight_transports.shm import SharedMemoryTransport

PEER = Path(__file__).parent / "peer.py"


@pytest.fixture
def start():
    """A function that starts the other end as a process; what still runs at the end is killed."""
    started = []

    def run(*arguments):
        command = [sys.executable, str(PEER), *arguments]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        with suppress(ProcessLookupError):
            process.kill()
        process.communicate()


def offer_in(line):
    fields = json.loads(line)
    specs = tuple(TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in fields["specs"])
    return Offer(version=fields["version"], specs=specs, place=fields["place"])


def offer_line(offer):
    specs = [(spec.name, spec.shape, spec.dtype) for spec in offer.specs]
    return json.dumps({"version": offer.version, "specs": specs, "place": dict(offer.place)}) + "\n"


def exists(offer):
    return [Path("/dev/shm", name).exists() for name in offer.place["segments"]]


TRANSPORTS = {
    "shm": lambda _tmp: SharedMemoryTransport(BucketConfig(bucket_bytes=512, checksum="crc32")),
    "disk": lambda tmp: DiskTransport(DiskConfig(bucket_bytes=512, directory=tmp)),
    "gloo": lambda _tmp: BroadcastTransport(BroadcastConfig(bucket_bytes=512, checksum="crc32", timeout_s=60)),
}


@pytest.mark.parametrize("name", sorted(TRANSPORTS))
def test_weights_reach_another_process(name, tmp_path, start):
    """Two replicas in processes of their own hold the published bits, and say so by a digest."""
    readers = [start(name, "read") for _ in range(2)]

    async def scenario():
        weights = some_weights(3)
        async with TRANSPORTS[name](tmp_path).publish(7, tuple(weights.items()), 2) as offer:
            for reader in readers:
                reader.stdin.write(offer_line(offer))
                reader.stdin.flush()
            return [await asyncio.to_thread(reader.stdout.readline) for reader in readers]

    answers = []
    within(collected(scenario(), answers), 120)
    held = {key: [list(map(float, array.reshape(-1)[:2])), array.nbytes] for key, array in some_weights(3).items()}
    assert [{"version": 7, "weights": held}] * 2 == [json.loads(answer) for answer in answers[0]]


async def collected(scenario, into):
    into.append(await scenario)


@pytest.mark.parametrize("victim", ["reader", "nobody"])
def test_shared_memory_is_always_unlinked(victim, start):
    """When the context ends, and when a reader was killed while it had the segments mapped."""
    reader = start("shm", "hold")

    async def scenario():
        transport = SharedMemoryTransport(BucketConfig(bucket_bytes=512))
        async with transport.publish(1, tuple(some_weights().items()), 1) as offer:
            assert all(exists(offer))
            reader.stdin.write(offer_line(offer))
            reader.stdin.flush()
            await asyncio.to_thread(reader.stdout.readline)
            if victim == "reader":
                os.kill(reader.pid, signal.SIGKILL)
                reader.wait()
            assert all(exists(offer))
        assert not any(exists(offer))

    within(scenario())


def test_shared_memory_of_a_killed_publisher_is_unlinked(start):
    """Its resource tracker lives on and cleans up; a reader that comes later is told in one line."""
    publisher = start("shm", "publish")
    offer = offer_in(publisher.stdout.readline())
    assert all(exists(offer))
    os.kill(publisher.pid, signal.SIGKILL)
    publisher.wait()
    deadline = time.monotonic() + 30
    while any(exists(offer)):
        assert time.monotonic() < deadline, "the segments outlived their publisher"
        time.sleep(0.05)
    with pytest.raises(EngineError, match="cannot read weights from shared memory"):
        asyncio.run(SharedMemoryTransport().apply(ReceivingEngine(), offer))


def test_a_broadcast_whose_publisher_dies_changes_nothing(start):
    """Killed between two pieces: the engine's source raises, and it has what it had."""
    publisher = start("gloo", "publish-halves")
    offer = offer_in(publisher.stdout.readline())
    engine = ReceivingEngine()
    engine.weights = {"old": np.ones(1)}

    async def scenario():
        async with asyncio.TaskGroup() as group:
            task = group.create_task(failure_of(BroadcastTransport().apply(engine, offer)))
            await asyncio.to_thread(publisher.stdout.readline)  # it has sent the first piece
            os.kill(publisher.pid, signal.SIGKILL)
        assert "the broadcast of weights (gloo) broke off" in task.result()

    within(scenario(), 90)
    assert ["old"] == list(engine.weights)


async def failure_of(awaitable):
    try:
        await awaitable
    except EngineError as error:
        return str(error)
    return "nothing failed"


@pytest.mark.parametrize("kind", ["crc32", "xxh3"])
def test_damage_is_found_before_anything_is_written(kind, tmp_path):
    """One flipped bit in shared memory or in a file: the engine is not even asked."""

    async def scenario():
        for transport, damage in (
            (SharedMemoryTransport(BucketConfig(checksum=kind)), lambda o: Path("/dev/shm", o.place["segments"][0])),
            (DiskTransport(DiskConfig(checksum=kind, directory=tmp_path)), lambda o: Path(o.place["files"][0])),
        ):
            engine = ReceivingEngine()
            async with transport.publish(1, tuple(some_weights().items()), 1) as offer:
                flip(damage(offer), -40 if "files" in offer.place else 8)
                with pytest.raises(EngineError, match=f"damaged: the {kind} checksum"):
                    await transport.apply(engine, offer)
            assert engine.weights == {}

    within(scenario())


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    with path.open("r+b") as file:
        file.write(content)


def test_a_broken_source_publishes_nothing(tmp_path):
    """A source that gives another weight than it said ends the publishing; nothing is left in memory or on disk."""

    class Liar:
        specs = (TensorSpec("a", (2,), "float32"), TensorSpec("b", (2,), "float32"))

        def __iter__(self):
            yield "a", np.zeros(2, np.float32)
            yield "c", np.zeros(2, np.float32)

    async def publish(transport):
        async with transport.publish(1, Liar(), 1):
            raise AssertionError("it was published")

    before = set(os.listdir("/dev/shm"))
    for transport in (SharedMemoryTransport(), DiskTransport(DiskConfig(directory=tmp_path))):
        with pytest.raises(EngineError, match="gave 'c' in place of 'b'"):
            asyncio.run(publish(transport))
    assert [] == list(tmp_path.iterdir())
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("psm_")]


def test_kept_files_are_ordinary_safetensors(tmp_path):
    """With `keep` they stay, for a look or as a checkpoint."""
    from turnwise.weight_sources import as_numpy, source_of

    async def scenario():
        transport = DiskTransport(DiskConfig(directory=tmp_path, keep=True))
        async with transport.publish(1, tuple(some_weights().items()), 1):
            pass

    within(scenario())
    (folder,) = tmp_path.iterdir()
    read = {name: as_numpy(array) for name, array in source_of(folder)}
    assert_same({name: some_weights()[name] for name in sorted(some_weights())}, {n: read[n] for n in sorted(read)})


def test_handles_are_lent_and_opened():
    """The path of `cuda_ipc`, with handles of a fake: without a GPU there are no real ones to open."""
    torch = pytest.importorskip("torch")
    lent = {}

    def share(tensor):
        lent[id(tensor)] = tensor
        return lent.get, (id(tensor),)

    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2).bfloat16()}
    engine = ReceivingEngine()

    async def scenario():
        transport = CudaIpcTransport(CudaIpcConfig(), share=share)
        async with transport.publish(4, tuple(weights.items()), 1) as offer:
            await transport.apply(engine, offer)

    within(scenario())
    assert (4, [0, 1, 2, 3, 4, 5]) == (engine.weight_version, engine.weights["a"].reshape(-1).tolist())
    assert [1, 1] == engine.weights["b"].tolist()


def test_a_tensor_on_a_cpu_has_no_handle():
    """One line says where it is and where it should be."""
    torch = pytest.importorskip("torch")

    async def publish():
        async with CudaIpcTransport().publish(1, [("a", torch.ones(2))], 1):
            pass

    with pytest.raises(EngineError, match="carries tensors on a GPU, and one is on cpu"):
        asyncio.run(publish())
