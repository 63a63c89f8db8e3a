"""Fork servers and their programs in a memory cgroup: a fake directory everywhere, the kernel's where there is one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from turnwise_python_sandbox import Sandbox, SandboxConfig, SandboxUnavailableError, Status, Tier
from turnwise_python_sandbox.memory_cgroup import create_cgroup
from turnwise_python_sandbox.selftest import build_server_spec
from turnwise_python_sandbox.server_process import start_server

ROOT = Path("/sys/fs/cgroup")


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """A directory that looks like a cgroup with the memory controller."""
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids\n")
    return tmp_path


@pytest.mark.parametrize("tier", [Tier.NAMESPACES, Tier.LANDLOCK])
def test_a_server_joins_before_it_starts(parent: Path, tier: Tier) -> None:
    """The limit is set, and the process that becomes the server, or bubblewrap around it, writes its own id."""
    own = parent / f"turnwise-sandbox-{os.getpid()}"
    config = SandboxConfig(cgroup=str(parent), cgroup_memory_mb=100)
    try:
        server = start_server(build_server_spec(config, tier))
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    try:
        server.control.recv(1)  # it has started, or has failed to
        assert (own / "memory.max").read_text() == f"{100 * 2**20}\n"
        assert (own / "cgroup.procs").read_text() == f"{server.process.pid}\n"
    finally:
        server.stop()


def test_cgroups_of_killed_processes_are_removed(parent: Path) -> None:
    """Those with processes stay; here, a file in the directory keeps it."""
    (parent / "turnwise-sandbox-1").mkdir()
    (parent / "turnwise-sandbox-2").mkdir()
    (parent / "turnwise-sandbox-2" / "cgroup.procs").write_text("2\n")

    own = Path(create_cgroup(str(parent), 64))

    assert {own.name, "turnwise-sandbox-2"} == {path.name for path in parent.iterdir() if path.is_dir()}


@pytest.mark.parametrize("controllers", ["cpu pids\n", None])
def test_a_directory_without_the_controller_is_refused(tmp_path: Path, controllers: str | None) -> None:
    """The sandbox does not run without the limit that it was asked for."""
    if controllers is not None:
        (tmp_path / "cgroup.subtree_control").write_text(controllers)
    with pytest.raises(SandboxUnavailableError, match=r"^cgroup: "):
        create_cgroup(str(tmp_path), 64)


def test_the_kernel_enforces_the_limit() -> None:
    """A program that holds more memory than the cgroup has is ended, although its own limit is higher."""
    control = ROOT / "cgroup.subtree_control"
    if not control.exists() or "memory" not in control.read_text().split() or not os.access(ROOT, os.W_OK):
        pytest.skip(f"{ROOT} is no cgroup v2 in which this user may create memory cgroups")
    with Sandbox(cgroup=str(ROOT), cgroup_memory_mb=256, memory_mb=2048, servers=1) as sandbox:
        assert sandbox.run("print(1)").status is Status.OK
        assert sandbox.run("held = bytearray(b'x') * (1 << 30)").status is not Status.OK
    assert not list(ROOT.glob(f"turnwise-sandbox-{os.getpid()}"))
