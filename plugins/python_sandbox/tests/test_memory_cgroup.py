"""Fork servers and their programs in a memory cgroup: a fake directory everywhere, the kernel's where there is one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnwise_python_sandbox import Sandbox, SandboxConfig, SandboxUnavailableError, Status, Tier
from turnwise_python_sandbox.memory_cgroup import create_cgroup, run_in_cgroup
from turnwise_python_sandbox.selftest import build_server_spec
from turnwise_python_sandbox.server_process import start_server


def find_mount() -> Path | None:
    """Return the directory of cgroup v2, which is also there beside version 1; None if there is none."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return next((Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"), None)


def gives_memory(cgroup: Path) -> bool:
    """Return whether the children of a cgroup have the memory controller."""
    return "memory" in (cgroup / "cgroup.subtree_control").read_text().split()


def find_delegated() -> Path | None:
    """Return a cgroup around this process in which this user may create memory cgroups."""
    mount = find_mount()
    if mount is None:
        return None
    own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    above = [mount, *(mount / part for part in Path(own.removeprefix("0::/")).parents)]
    return next((each for each in above if gives_memory(each) and os.access(each, os.W_OK)), None)


@pytest.fixture
def kernel_cgroup() -> Iterator[Path]:
    """A cgroup of the kernel, with or without the memory controller."""
    mount = find_mount()
    if mount is None:
        pytest.skip("this machine has no cgroup v2")
    path = mount / f"turnwise-test-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"this user may not create cgroups in {mount}: {error.strerror}")
    yield path
    path.rmdir()


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


def test_a_command_joins_a_cgroup_of_the_kernel(kernel_cgroup: Path) -> None:
    """It and its children are inside, and the process that started it is not."""
    command = run_in_cgroup(str(kernel_cgroup), ["/bin/sh", "-c", "cat /proc/self/cgroup; cat /proc/$$/cgroup"])
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()

    found = [line for line in lines if line.startswith("0::")]
    assert len(found) == 2
    assert all(line.endswith(f"/{kernel_cgroup.name}") for line in found)
    assert kernel_cgroup.name not in Path("/proc/self/cgroup").read_text()


def test_a_cgroup_of_the_kernel_without_the_controller_is_refused(kernel_cgroup: Path) -> None:
    """No directory is made in it, and no program runs without the limit."""
    with (
        pytest.raises(SandboxUnavailableError, match=r"does not give its children the memory controller"),
        Sandbox(cgroup=str(kernel_cgroup), servers=1) as sandbox,
    ):
        sandbox.run("print(1)")
    assert not list(kernel_cgroup.glob("turnwise-sandbox-*"))


def test_the_kernel_enforces_the_limit() -> None:
    """A program that holds more memory than the cgroup has is ended, although its own limit is higher."""
    delegated = find_delegated()
    if delegated is None:
        pytest.skip("no cgroup v2 around this process in which this user may create memory cgroups")
    with Sandbox(cgroup=str(delegated), cgroup_memory_mb=256, memory_mb=2048, servers=1) as sandbox:
        assert sandbox.run("print(1)").status is Status.OK
        assert sandbox.run("held = bytearray(b'x') * (1 << 30)").status is not Status.OK
    assert not list(delegated.glob(f"turnwise-sandbox-{os.getpid()}"))
