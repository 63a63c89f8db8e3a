"""Fixtures for the tests of transports: peer processes, and the shared-memory segments of this process."""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from turnwise_weight_transports import shm

PEER = Path(__file__).parent / "transport_peer.py"


@pytest.fixture
def start_peer():
    """
    A function that starts the other end of a transport as a process, and kills it at the end of the test.

    `prefix` is a command that runs the process, and `preexec_fn` is called in it before it starts.
    """
    started = []

    def start(*arguments, prefix=(), preexec_fn=None):
        command = [*prefix, sys.executable, str(PEER), *map(str, arguments)]
        started.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=preexec_fn)
        )
        return started[-1]

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            process.kill()
        process.communicate()


@pytest.fixture
def segments(monkeypatch):
    """
    The paths of all segments that this process creates.

    Listing /dev/shm instead would also show segments of other processes of this machine.
    """
    created = []
    create = shm.SharedMemory

    def record(*args, **kwargs):
        segment = create(*args, **kwargs)
        created.append(Path("/dev/shm", segment.name))
        return segment

    monkeypatch.setattr(shm, "SharedMemory", record)
    return created
