"""A broadcast listens on the configured address alone."""

import asyncio
import sys
from ipaddress import ip_address
from pathlib import Path

import numpy as np
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from transport_peer import TRANSPORTS, format_offer

from turnwise.protocols.weights import TensorSpec
from turnwise_testing.checks.transport import ReceivingEngine, assert_same, carry, some_weights, within
from turnwise_weight_transports.broadcast import BroadcastTransport
from turnwise_weight_transports.config import BroadcastConfig


def listeners(pid=None):
    """The addresses on which a process listens."""
    return {each.laddr for each in psutil.Process(pid).net_connections() if each.status == psutil.CONN_LISTEN}


class Source:
    """A source of one weight, which calls a function after the replicas have joined."""

    specs = (TensorSpec("a", (8,), "float32"),)

    def __init__(self, when_joined):
        self.when_joined = when_joined

    def __iter__(self):
        self.when_joined()
        yield "a", np.zeros(8, np.float32)


def test_trainer_and_replica_listen_on_loopback_alone(start_peer):
    """Both listen while weights travel, and neither on another address."""
    reader, before, found = start_peer("gloo", "read"), listeners(), {}

    def look():
        found["trainer"], found["replica"] = listeners() - before, listeners(reader.pid)

    async def scenario():
        async with TRANSPORTS["gloo"](None).publish(1, Source(look), 1) as manifest:
            reader.stdin.write(format_offer(manifest))
            reader.stdin.flush()
            assert '"a"' in await asyncio.to_thread(reader.stdout.readline)

    within(scenario(), 90)
    assert len(found["trainer"]) == 2  # the store, and gloo
    assert len(found["replica"]) == 1
    assert all(ip_address(each.ip).is_loopback for each in found["trainer"] | found["replica"])


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "::", "trainer.cluster"])
def test_other_addresses_need_consent(host):
    """Nothing authenticates a replica."""
    with pytest.raises(
        ValueError, match=r"can be reached by other machines.*; set trusted_network to true on a network"
    ):
        BroadcastConfig(host=host)
    assert BroadcastConfig(host=host, trusted_network=True).host == host


@pytest.mark.parametrize("host", ["127.0.0.2", "::1", "localhost"])
def test_loopback_needs_no_consent(host):
    """A version is carried over each of these."""
    engine, transport = ReceivingEngine(), BroadcastTransport(BroadcastConfig(host=host, timeout_s=60))

    async def scenario():
        assert await carry(transport, [engine], some_weights(), 1) == [None]

    within(scenario(), 90)
    assert_same(some_weights(), engine.weights)
