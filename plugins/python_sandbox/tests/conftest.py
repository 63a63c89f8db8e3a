"""Sandboxes of the tiers that this machine has; the others are skipped with the reason."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from turnwise_python_sandbox import Sandbox, SandboxUnavailableError


def _parents() -> dict[int, int]:
    """Return the parent of every process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # The name, in parentheses, may hold anything.
            found[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def _below(roots: set[int]) -> set[int]:
    parents = _parents()
    found: set[int] = set()
    fresh = set(roots)
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


@pytest.fixture(scope="session")
def our_processes() -> Callable[[], set[int]]:
    """All processes below this one."""
    return lambda: _below({os.getpid()})


@pytest.fixture(scope="session")
def programs_of() -> Callable[[Sandbox], set[int]]:
    """The processes of a sandbox besides its servers, which are those that were there before the first program."""
    known: dict[int, set[int]] = {}

    def programs(sandbox: Sandbox) -> set[int]:
        servers = set(sandbox.start()._started.backend.server_pids)
        found = _below(servers)
        for server in servers - known.keys():
            known[server] = found
        return found - set().union(*(known[server] for server in servers))

    return programs


@pytest.fixture
def make_sandbox() -> Iterator[Callable[..., Sandbox]]:
    """Make started sandboxes, closed at the end; a tier that does not work here skips the test with the reason."""
    made: list[Sandbox] = []

    def make(tier: int, **changes: object) -> Sandbox:
        try:
            made.append(Sandbox(tier=tier, **changes).start())
        except SandboxUnavailableError as error:
            pytest.skip(f"tier {tier} does not work here: {error}")
        return made[-1]

    yield make
    for sandbox in made:
        sandbox.close()


@pytest.fixture(scope="session", params=[1, 2], ids=["tier1", "tier2"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """One small sandbox per tier, for all tests that only run programs."""
    limits = {"timeout_s": 5.0, "memory_mb": 256, "disk_mb": 16, "max_files": 200}
    try:
        box = Sandbox(tier=request.param, servers=1, max_in_flight=2, **limits).start()
    except SandboxUnavailableError as error:
        pytest.skip(f"tier {request.param} does not work here: {error}")
    box.run("pass")
    yield box
    box.close()
