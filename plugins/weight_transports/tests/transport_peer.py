"""
The other end of a transport as a process: `transport_peer.py TRANSPORT ROLE [FOLDER]`.

Offers travel as lines of JSON on standard input and output. Roles:

    read            applies a manifest and prints the engine's weights
    read-one        reads one weight of a manifest, says so, and waits
    publish         publishes, prints the manifest, and waits
    publish-slowly  publishes two buckets, says when the first one is written, and waits before the second
    publish-large   publishes 512 KiB, for which there is no space, and prints the error
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import numpy as np

from turnwise.errors import EngineError
from turnwise.protocols.weights import TensorSpec, WeightManifest
from turnwise_testing.checks.transport import ReceivingEngine, some_weights
from turnwise_weight_transports.broadcast import BroadcastTransport
from turnwise_weight_transports.config import BroadcastConfig, BucketConfig, DiskConfig
from turnwise_weight_transports.disk import DiskTransport
from turnwise_weight_transports.shm import SharedMemoryTransport

TRANSPORTS = {
    "shm": lambda _folder: SharedMemoryTransport(BucketConfig(bucket_bytes=512, checksum="crc32")),
    "disk": lambda folder: DiskTransport(DiskConfig(bucket_bytes=512, directory=folder)),
    "gloo": lambda _folder: BroadcastTransport(BroadcastConfig(bucket_bytes=512, checksum="crc32", timeout_s=60)),
}


def parse_offer(line):
    """Return the manifest of a line."""
    fields = json.loads(line)
    specs = tuple(TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in fields["specs"])
    return WeightManifest(version=fields["version"], specs=specs, locator=fields["locator"])


def format_offer(manifest):
    """Return a manifest as a line."""
    specs = [(spec.name, spec.shape, spec.dtype) for spec in manifest.specs]
    return json.dumps({"version": manifest.version, "specs": specs, "locator": dict(manifest.locator)}) + "\n"


def summarize(version, weights):
    """Return a version and its weights as JSON values: the bits of each array in hexadecimal."""
    bits = {name: [str(array.dtype), list(array.shape), array.tobytes().hex()] for name, array in weights.items()}
    return {"version": version, "weights": bits}


def say(line):
    sys.stdout.write(line.rstrip("\n") + "\n")
    sys.stdout.flush()


class OneWeightEngine(ReceivingEngine):
    """An engine that reads one weight and waits to be killed."""

    async def update_weights(self, weights, version):
        await asyncio.to_thread(lambda: next(iter(weights)))
        say("one weight is read")
        await asyncio.Event().wait()


class SlowSource:
    """Two weights of a bucket each, and a wait between them that only a kill ends."""

    specs = (TensorSpec("a", (1024,), "float32"), TensorSpec("b", (1024,), "float32"))

    def __iter__(self):
        yield "a", np.zeros(1024, np.float32)
        say("the first bucket is written")
        while True:
            time.sleep(60)


async def read(transport):
    engine = ReceivingEngine()
    await transport.apply(engine, parse_offer(sys.stdin.readline()))
    say(json.dumps(summarize(engine.weight_version, engine.weights)))


async def read_one(transport):
    await transport.apply(OneWeightEngine(), parse_offer(sys.stdin.readline()))


async def publish(transport, weights=None):
    async with transport.publish(1, tuple(some_weights().items()) if weights is None else weights, 1) as manifest:
        say(format_offer(manifest))
        await asyncio.Event().wait()


async def publish_slowly(transport):
    await publish(transport, SlowSource())


async def publish_large(transport):
    try:
        await publish(transport, [("small", np.zeros(64)), ("large", np.zeros(1 << 16))])
    except EngineError as error:
        say(str(error))


ROLES = {
    "read": read,
    "read-one": read_one,
    "publish": publish,
    "publish-slowly": publish_slowly,
    "publish-large": publish_large,
}

if __name__ == "__main__":
    folder = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    asyncio.run(ROLES[sys.argv[2]](TRANSPORTS[sys.argv[1]](folder)))
