"""Snapshots of what a hostile agent leaves, of containers on the disk, and through the owner of workspaces."""

from __future__ import annotations

import asyncio

import pytest
from boxes import list_boxes, why_no_boxes
from images import ENGINE, IMAGE, RUN_OPTIONS, list_containers, list_snapshots, why_no_containers
from test_owner import SPEC, Setup

from turnwise import Resources
from turnwise.errors import ConfigError, InfrastructureError
from turnwise_testing.checks import workspace_snapshots as checks
from turnwise_testing.checks.workspace import WorkspaceExample, WorkspaceProbe
from turnwise_testing.probes.faulty_workspaces import Faults, MemoryWorkspace
from turnwise_workspaces import Command, Limits, Snapshot, Workspace, WorkspaceFileError, WorkspaceSpec
from turnwise_workspaces.bubblewrap import BubblewrapBackend
from turnwise_workspaces.config import BubblewrapConfig, ContainersConfig
from turnwise_workspaces.containers import ContainersBackend
from turnwise_workspaces.owner import OwnedWorkspace

needs_boxes = pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())
PYTHON = "/usr/bin/python3"
DEEP = f'{PYTHON} -c \'import os; [(os.mkdir("d"), os.chdir("d")) for _ in range(3000)]\''
"""Deeper than the longest path, and than a recursion of Python."""


async def do(workspace: Workspace, text: str) -> str:
    """Run a text, which must succeed."""
    done = await workspace.exec(Command(argv=("/bin/sh", "-c", text), timeout_s=60.0))
    assert done.exit_code == 0, done
    return done.stdout.decode()


def in_box(use, spec: WorkspaceSpec | None = None) -> None:
    """Use a new box."""

    async def run():
        workspace = await BubblewrapBackend(BubblewrapConfig(), Resources()).start(spec or WorkspaceSpec())
        try:
            await use(workspace)
        finally:
            await workspace.close()

    asyncio.run(run())
    assert list_boxes() == []


@needs_boxes
@pytest.mark.parametrize(
    ("before", "after", "show"),
    [
        (
            "mkdir -p x/y; echo 1 > x/y/z; chmod 000 x/y/z x/y x; chmod 111 .",
            "chmod 755 . x x/y; rm -rf x",
            "stat -c %a . x",
        ),
        ("mkdir -p x/y; echo 1 > x/y/z; chmod 000 x/y/z x/y", "chmod -R 755 .; echo 2 > x/y/z", "stat -c %a x/y"),
        ("truncate -s 1T big; printf end >> big", "rm big", "stat -c '%s %b' big; tail -c 3 big"),
        (
            "echo 1 > a; ln a b; ln -s a c; ln -s /none/at/all d",
            "rm a b c d; mkdir a b",
            "ls -id a b; ls -l c d; cat b",
        ),
        ("touch -d @1 a; mkdir f; touch -d @2 f; chmod 6711 a", "rm -r a f", "stat -c '%Y %a' a f"),
        ("echo 1 > a", DEEP, "cat a; ls"),
        ("echo 1 > a", "chmod 000 .; mkdir -m 000 /tmp/x; echo > /dev/shm/x", "cat a; ls /tmp /dev/shm"),
        ("echo 1 > a", "head -c 1G /dev/zero > full; head -c 1G /dev/zero > /tmp/full; true", "cat a; ls . /tmp"),
        ("mkfifo p; touch \"$(printf '\\377\\n')\"", "rm -f *", "ls -b"),
        (f"{PYTHON} -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"s\")'; echo 1 > a", "rm a", "cat a"),
    ],
    ids=["no modes", "no mode of a file", "holes", "links", "times", "deep", "closed", "full", "pipes", "sockets"],
)
def test_a_box_comes_back(before, after, show):
    """Whatever the agent made before or after the snapshot, without privileges."""

    async def use(workspace):
        await do(workspace, before)
        expected = await do(workspace, f"{show} 2>&1 || true")
        kept = await workspace.snapshot()
        assert await do(workspace, f"{show} 2>&1 || true") == expected
        await do(workspace, after)
        await workspace.restore(kept)
        found = await do(workspace, f"{show} 2>&1 || true")
        if show.startswith("ls -i"):  # the inodes are others, and one file as before
            found, expected = ([each.split() for each in text.splitlines()] for text in (found, expected))
            assert found[0][0] == found[1][0]
            found, expected = ([line[1:] for line in each[:2]] + each[2:] for each in (found, expected))
        assert found == expected

    in_box(use, WorkspaceSpec(limits=Limits(disk_mb=8)))


@needs_boxes
def test_a_tree_that_is_too_deep_is_the_agents_doing():
    """The error is no loss, and the box serves on."""

    async def use(workspace):
        await do(workspace, DEEP)
        with pytest.raises(WorkspaceFileError, match="cannot be copied: File name too long: '/workspace/d/d"):
            await workspace.snapshot()
        assert await do(workspace, "echo alive") == "alive\n"

    in_box(use)


@needs_boxes
def test_mounts_and_folders_inside_the_working_folder_stay():
    """A mount is neither copied nor removed, and a further folder comes back as the working folder does."""
    spec = WorkspaceSpec(folders=("/workspace/logs/deep",), mounts={"/workspace/opt/tool": PYTHON})

    async def use(workspace):
        await do(workspace, "echo 1 > logs/deep/a; echo 1 > opt/a; echo 1 > logs/b")
        kept = await workspace.snapshot()
        await do(workspace, "rm logs/deep/a opt/a logs/b; echo 2 > logs/deep/c; echo 2 > opt/c; echo 2 > logs/c")
        await workspace.restore(kept)
        found = await do(workspace, "cat logs/deep/a opt/a logs/b; ls logs/deep opt logs; test -s opt/tool")
        assert found.split() == ["1", "1", "1", "logs:", "b", "deep", "logs/deep:", "a", "opt:", "a", "tool"]

    in_box(use, spec)


@needs_boxes
def test_the_agent_cannot_reach_a_snapshot():
    """No descriptor of it is open in a process of the agent, and the supervisor's cannot be opened."""

    async def use(workspace):
        await do(workspace, "echo secret > a")
        await workspace.snapshot()
        assert "snapshot" not in await do(workspace, "ls -l /proc/[0-9]*/fd 2>/dev/null || true")

    in_box(use)


# Containers


@pytest.fixture
def engine():
    """Skip where no container runs; nothing is left."""
    if reason := why_no_containers():
        pytest.skip(reason)
    yield
    assert list_left() == []


def list_left() -> list[str]:
    """Return what this process has; another test that runs now kills its drivers."""
    return [*list_containers(), *list_snapshots(gone=False)]


def containers(disk: str) -> ContainersBackend:
    """Return a backend of containers."""
    return ContainersBackend(ContainersConfig(command=ENGINE, run_options=RUN_OPTIONS, disk=disk), Resources())


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        checks.check_a_snapshot_brings_any_tree_back,
        checks.check_snapshots_are_restored_again_and_again,
        checks.check_a_restoration_ends_processes,
        checks.check_snapshots_that_are_none,
    ],
)
@pytest.mark.usefixtures("engine")
def test_containers_on_the_disk_come_back(check):
    """Images of the engine keep the promises, and end with their workspace."""
    example = WorkspaceExample(spec=WorkspaceSpec(image=IMAGE), leftovers=list_left)
    probe = WorkspaceProbe(make_backend=lambda: containers("none"), example=example)
    outcome = check(probe)
    if outcome is not None:
        assert asyncio.run(outcome) is None


@pytest.mark.slow
@pytest.mark.usefixtures("engine")
def test_a_whole_root_comes_back():
    """With `disk: none` also what lies outside of the working folder, and also from a kill, nothing stays."""

    async def run(is_killed):
        workspace = await containers("none").start(WorkspaceSpec(image=IMAGE))
        try:
            kept = await workspace.snapshot()
            await do(workspace, "echo 1 > /etc/new; rm /bin/vi")
            changed = await workspace.snapshot()
            await workspace.restore(kept)
            assert await do(workspace, "ls /etc/new /bin/vi 2>/dev/null || true") == "/bin/vi\n"
            await workspace.restore(changed)
            await workspace.drop(kept)
            await workspace.drop(changed)  # the container is of this image
            assert await do(workspace, "ls /etc/new /bin/vi 2>/dev/null || true") == "/etc/new\n"
            if is_killed:
                workspace.kill()
        finally:
            await workspace.close()

    for is_killed in (False, True):
        asyncio.run(run(is_killed))


@pytest.mark.slow
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("disk", "limit"), [("tmpfs", 24), ("none", 4)])
def test_a_snapshot_of_a_container_is_bounded(disk, limit):
    """A file of a terabyte without data would have it in an archive or an image: an error, and processes go on."""

    async def run():
        spec = WorkspaceSpec(image=IMAGE, limits=Limits(disk_mb=4))
        workspace = await containers(disk).start(spec)
        try:
            await do(
                workspace, "truncate -s 1099511627776 big && mkfifo fifo && (while :; do echo tick > fifo; done) &"
            )
            with pytest.raises(WorkspaceFileError, match=f"cannot be copied: more than {limit} MiB"):
                await workspace.snapshot()
            assert await do(workspace, "read x < fifo; echo $x; rm big") == "tick\n"
            await workspace.restore(await workspace.snapshot())
        finally:
            await workspace.close()

    asyncio.run(run())


# The owner


@pytest.mark.parametrize(
    ("faults", "text"),
    [
        (Faults(snapshot_hangs=True), "the workspace is lost: a snapshot did not end within"),
        (Faults(restore_loses=True), "the workspace is lost: InfrastructureError: the workspace has ended"),
    ],
)
def test_faults_are_losses(faults, text, tmp_path, monkeypatch):
    """A snapshot or a restoration that fails is owned by the infrastructure, and leaves nothing."""
    monkeypatch.setattr("turnwise_workspaces.owner.SNAPSHOT_S", 0.05)

    async def run():
        setup = Setup(tmp_path, faults)
        async with setup.owner.workspace(SPEC) as workspace:
            with pytest.raises(InfrastructureError, match=text):
                await workspace.restore(await workspace.snapshot())
        setup.expect_nothing_left()

    asyncio.run(run())


def test_mistakes_of_the_caller_are_no_loss(tmp_path):
    """A snapshot of another workspace, or one that was dropped, is refused, and the workspace can be used."""

    async def run():
        setup = Setup(tmp_path, Faults())
        async with setup.owner.workspace(SPEC) as workspace, setup.owner.workspace(SPEC) as other:
            dropped = await workspace.snapshot()
            await workspace.drop(dropped)
            for one in (dropped, await other.snapshot(), Snapshot(workspace="", name="")):
                with pytest.raises(ValueError, match="no such snapshot"):
                    await workspace.restore(one)
            await workspace.write("a", b"1")
            kept = await workspace.snapshot()
            await workspace.write("a", b"2")
            await workspace.restore(kept)
            assert await workspace.read("a", max_bytes=2) == b"1"

    asyncio.run(run())


class Plain:
    """A workspace of a backend without snapshots."""

    kill = MemoryWorkspace.kill


def test_a_backend_without_snapshots_says_so():
    """In words, and not by a missing attribute."""
    with pytest.raises(ConfigError, match="the backend of the workspaces takes no snapshots"):
        asyncio.run(OwnedWorkspace(Plain(), 1.0).snapshot())
