"""The descriptors that a program has."""

from __future__ import annotations

import json

import pytest
from sandbox_settings import Host

pytestmark = pytest.mark.usefixtures("starts_a_process")

LIST = """
import fcntl, json, os, sys
found = {}
for fd in range(1 << 16):
    try:
        found[fd] = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_PATH)
    except OSError:
        continue
print(json.dumps([found, sys.path]))
"""
USE = """
import os, sys
for fd in range(3, 1 << 16):
    for attempt in (os.read, lambda fd, _: os.write(fd, b"x"), lambda fd, _: os.fchmod(fd, 0o777),
                    lambda fd, _: os.open("own.txt", os.O_CREAT | os.O_WRONLY, dir_fd=fd)):
        try:
            attempt(fd, 9)
        except OSError:
            continue
        print("BREACH", fd, attempt)
import wave
print(wave.__name__)
"""


def test_a_program_has_its_streams_alone(host: Host) -> None:
    """Its only other descriptors are paths through which it imports an interpreter that its user cannot reach."""
    (result,) = host.run([LIST])

    found, path = json.loads(result["stdout"])
    assert {"0", "1", "2"} <= found.keys()
    others = {f"/proc/self/fd/{fd}": is_path for fd, is_path in found.items() if int(fd) > 2}
    assert all(others.values())
    assert all(any(each.startswith(f"{other}/") for each in path) for other in others)
    if host.setting.tier == 1 or host.setting.user != "root":
        assert {} == others


def test_paths_of_the_interpreter_let_a_program_import_alone(host: Host) -> None:
    """A program can neither read, write nor change such a path, and imports modules that are not preloaded."""
    (result,) = host.run([USE])

    assert ("wave\n", "") == (result["stdout"], result["stderr"])
