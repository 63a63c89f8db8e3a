"""The transports that run without a GPU pass the conformance suite of weight transports."""

import pytest

from turnwise_testing import WeightTransportSuite
from turnwise_testing.suites.plugin import PluginSuite
from turnwise_weight_transports.config import BroadcastConfig, BucketConfig, DiskConfig

SMALL = {"bucket_bytes": 512}  # several buckets, one of them with a single larger weight


class TransportSuite(WeightTransportSuite):
    entry_point = "weight_transports"
    module = "turnwise_weight_transports"


class TestSharedMemory(TransportSuite):
    """Shared memory with `crc32`."""

    registered = "shm"

    @pytest.fixture
    def config(self):
        return BucketConfig(**SMALL, checksum="crc32")


class TestDisk(TransportSuite):
    """Files with `xxh3`."""

    registered = "disk"

    @pytest.fixture
    def config(self, tmp_path):
        return DiskConfig(**SMALL, checksum="xxh3", directory=tmp_path)


class TestGloo(TransportSuite):
    """A broadcast between threads of this process."""

    registered = "gloo"

    @pytest.fixture
    def config(self):
        return BroadcastConfig(**SMALL, checksum="crc32", timeout_s=20)


class TestDiagnostic(PluginSuite):
    """The diagnosis of the transports."""

    entry_point = "weight_transports"
    module = "turnwise_weight_transports"
    registered = "weight_transports"
    hook = "register_diagnostics"
