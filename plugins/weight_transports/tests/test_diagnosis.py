"""The diagnosis of the transports on this machine."""

from contextlib import asynccontextmanager

import pytest

from turnwise.protocols.weights import WeightManifest
from turnwise_weight_transports import diagnosis
from turnwise_weight_transports.diagnosis import diagnose, try_transport

TORCH_TRANSPORTS = ("gloo", "cuda_ipc", "nccl")


class WrongNumbers:
    """Delivers no weights."""

    @asynccontextmanager
    async def publish(self, version, weights, num_readers):
        yield WeightManifest(version=version, specs=())

    async def apply(self, target, manifest):
        await target.update_weights([], 1)

    async def close(self):
        pass


def states():
    return {finding.item: finding.state for finding in diagnose()}


def test_transports_without_a_gpu_work(monkeypatch):
    """Shared memory, files and gloo carry weights; transports between GPUs are limited on a CPU."""
    monkeypatch.setattr(diagnosis, "_has_gpu", lambda: False)

    found = states()

    assert {"shm", "disk", "ray", *TORCH_TRANSPORTS} == found.keys()
    assert ["ok"] * 4 == [found[name] for name in ("shm", "disk", "ray", "gloo")]
    assert ["limited"] * 2 == [found[name] for name in ("cuda_ipc", "nccl")]


def test_transports_of_gpus(monkeypatch):
    """With a GPU they are usable; they are not tried, because a trial needs two processes."""
    monkeypatch.setattr(diagnosis, "_has_gpu", lambda: True)

    assert "ok" == states()["nccl"]


def test_missing_packages(monkeypatch):
    """The hint of each transport installs the extra that it needs."""
    monkeypatch.setattr(diagnosis, "find_spec", lambda name: None)

    found = {finding.item: finding for finding in diagnose()}

    assert ["missing"] * 3 == [found[name].state for name in TORCH_TRANSPORTS]
    assert "pip install 'turnwise-weight-transports[torch]'" == found["gloo"].hint
    assert "pip install 'turnwise-weight-transports[ray]'" == found["ray"].hint


def raise_error():
    raise OSError("no space left")


@pytest.mark.parametrize(
    ("make", "text"),
    [(WrongNumbers, "ValueError: sent a weight with the sum 6, received the sums {}"), (raise_error, "no space left")],
)
def test_a_transport_that_fails_is_broken(make, text):
    """The finding has the error, also if the transport delivers other numbers."""
    finding = try_transport("shm", make)

    assert "broken" == finding.state
    assert text in finding.explanation
