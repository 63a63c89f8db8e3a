"""Every transport that runs without a GPU does what every transport must do."""

import pytest

from turnwise.testing.transport_suite import WeightTransportSuite
from turnwise_weight_transports.config import BroadcastConfig, BucketConfig, DiskConfig

SMALL = {"bucket_bytes": 512}  # several pieces, one of them larger than that


class TransportSuite(WeightTransportSuite):
    entry_point = "weight_transports"
    module = "turnwise_weight_transports"


class TestSharedMemory(TransportSuite):
    """Shared memory, with a checksum."""

    registered = "shm"

    @pytest.fixture
    def config(self):
        return BucketConfig(**SMALL, checksum="crc32")


class TestDisk(TransportSuite):
    """Files, with the other checksum."""

    registered = "disk"

    @pytest.fixture
    def config(self, tmp_path):
        return DiskConfig(**SMALL, checksum="xxh3", directory=tmp_path)


class TestGloo(TransportSuite):
    """A broadcast among threads of this process; among processes in `test_processes`."""

    registered = "gloo"

    @pytest.fixture
    def config(self):
        return BroadcastConfig(**SMALL, checksum="crc32", timeout_s=20)
