"""A reader that is still copying when its publisher ends the version, and publishes the next one."""

import numpy as np
import pytest

from turnwise.errors import EngineError
from turnwise_testing.checks.transport import within
from turnwise_weight_transports.config import BucketConfig, DiskConfig
from turnwise_weight_transports.disk import DiskTransport
from turnwise_weight_transports.shm import SharedMemoryTransport

NAMES = ("a", "b", "c", "d")


def make_transport(kind, folder):
    if kind == "disk":
        return DiskTransport(DiskConfig(directory=folder, bucket_bytes=64))
    return SharedMemoryTransport(BucketConfig(bucket_bytes=64))


class SlowEngine:
    """Calls an async function before it copies one of the weights."""

    def __init__(self, moment, pause):
        self.moment, self.pause, self.weights = moment, pause, {}

    async def update_weights(self, weights, version):
        for index, (name, array) in enumerate(weights):
            if index == self.moment:
                await self.pause()
            self.weights[name] = np.array(array)


@pytest.mark.parametrize("kind", ["shm", "disk"])
@pytest.mark.parametrize("moment", range(len(NAMES)))
def test_a_slow_reader_gets_one_version_or_an_error(kind, moment, tmp_path):
    """Memory and files of a version are never used again, so no reader gets a mixture of two versions."""
    versions = {v: {name: np.full(16, 10.0 * v + i) for i, name in enumerate(NAMES)} for v in (1, 2)}

    outcomes = []

    async def scenario():
        transport = make_transport(kind, tmp_path)
        published = transport.publish(1, versions[1].items(), 1)
        manifest = await published.__aenter__()
        later = []

        async def next_version():
            await published.__aexit__(None, None, None)
            later.append(transport.publish(2, versions[2].items(), 1))
            await later[0].__aenter__()

        engine = SlowEngine(moment, next_version)
        try:
            await make_transport(kind, tmp_path).apply(engine, manifest)
            outcomes.append({name: array.tolist() for name, array in engine.weights.items()})
        except EngineError:
            outcomes.append("an error")
        await later[0].__aexit__(None, None, None)

    within(scenario())
    whole = {name: array.tolist() for name, array in versions[1].items()}
    assert outcomes in ([whole], ["an error"])
