"""
The other end of a transport, as a process: `peer.py TRANSPORT ROLE`, with an offer as a line of JSON in or out.

Roles: `read` applies an offer and prints what the engine holds; `hold` maps shared memory and waits; `publish` offers
and waits; `publish-halves` sends the first piece of a broadcast, says so, and waits.
"""

import asyncio
import json
import sys
import time

import numpy as np
from test_processes import TRANSPORTS, offer_in, offer_line

from turnwise.testing.transport_suite import ReceivingEngine, some_weights
from turnwise.weights import TensorSpec
from turnwise_weight_transports import shm


def say(line):
    sys.stdout.write(line.rstrip("\n") + "\n")
    sys.stdout.flush()


async def read(transport):
    engine, offer = ReceivingEngine(), offer_in(sys.stdin.readline())
    await transport.apply(engine, offer)
    held = {name: [list(map(float, array.reshape(-1)[:2])), array.nbytes] for name, array in engine.weights.items()}
    say(json.dumps({"version": engine.weight_version, "weights": held}))


async def hold(_transport):
    offer = offer_in(sys.stdin.readline())
    mapped = [shm._mapped(name) for name in offer.place["segments"]]
    say(f"mapped {len(mapped)}")
    await asyncio.sleep(60)


async def publish(transport):
    async with transport.publish(1, tuple(some_weights().items()), 1) as offer:
        say(offer_line(offer))
        await asyncio.sleep(60)


class SlowSource:
    """Two pieces, and a long time between them."""

    specs = (TensorSpec("a", (1024,), "float32"), TensorSpec("b", (1024,), "float32"))

    def __iter__(self):
        yield "a", np.zeros(1024, np.float32)
        say("the first piece is sent")
        time.sleep(60)
        yield "b", np.zeros(1024, np.float32)


async def publish_halves(transport):
    async with transport.publish(1, SlowSource(), 1) as offer:
        say(offer_line(offer))
        await asyncio.sleep(60)


ROLES = {"read": read, "hold": hold, "publish": publish, "publish-halves": publish_halves}

if __name__ == "__main__":
    asyncio.run(ROLES[sys.argv[2]](TRANSPORTS[sys.argv[1]](None)))
