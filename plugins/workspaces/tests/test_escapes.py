"""What a hostile agent tries in a box of bubblewrap; the suite of conformance has the bombs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys

import pytest
from boxes import why_no_boxes

from turnwise import Resources
from turnwise_workspaces import Command, Limits, WorkspaceFileError, WorkspaceSpec
from turnwise_workspaces.bubblewrap import BubblewrapBackend
from turnwise_workspaces.config import BubblewrapConfig

pytestmark = pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())
PYTHON = "/usr/bin/python3"


def attempt(*texts: str, limits: Limits | None = None, timeout_s: float = 20.0) -> list[str]:
    """Run shell texts in a new box, and return their outputs after the box served one more command."""

    async def run():
        backend = BubblewrapBackend(BubblewrapConfig(), Resources())
        workspace = await backend.start(WorkspaceSpec(limits=limits or Limits()))
        try:
            commands = [Command(argv=("/bin/sh", "-c", text), timeout_s=timeout_s) for text in texts]
            results = [await workspace.exec(command) for command in commands]
            after = await workspace.exec(Command(argv=("/bin/echo", "alive")))
            assert after.stdout == b"alive\n"
            return [result.stdout.decode(errors="replace") for result in results]
        finally:
            await workspace.close()

    return asyncio.run(run())


def test_host_files_are_not_there(tmp_path):
    """Folders of users, secrets of the system and files of this process cannot be read, by no path through /proc."""
    secret = tmp_path / "secret"
    secret.write_text("hidden words")
    paths = (str(secret), "/etc/shadow", "/root/.bashrc", "/home", "/var/lib", f"/proc/{os.getpid()}/environ")
    tricks = ("/proc/1/root/etc/shadow", f"/proc/self/root{secret}", "/proc/1/environ", "/proc/1/mem", "/proc/kcore")
    tried = (*paths, *tricks)

    outputs = attempt(*(f"cat {path} 2>&1 | head -c 100" for path in tried))

    assert {path: output for path, output in zip(tried, outputs, strict=True) if output and "cat: " not in output} == {}


def test_nothing_outside_the_working_folder_can_be_written(tmp_path):
    """The root, programs, devices and the supervisor's code are read-only."""
    refused = ("/x", "/usr/x", "/etc/passwd", "/dev/x", "/proc/sys/kernel/hostname", "/etc/turnwise/x", f"{tmp_path}/x")
    paths = (*refused, "/workspace/x", "/tmp/x")

    outputs = attempt(*(f"echo x > {path} && echo done" for path in paths))

    assert [path for path, output in zip(paths, outputs, strict=True) if "done" in output] == ["/workspace/x", "/tmp/x"]


def test_host_processes_cannot_be_killed():
    """A process of the host has no id in the box, and the supervisor ignores every signal."""
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        attempt(f"kill -9 {victim.pid}; kill -9 -1; for s in 1 2 3 9 11 15 17 19 20; do kill -$s 1; done")
        assert victim.poll() is None
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait()


def test_the_network_of_the_host_is_not_reached():
    """A server on this machine's loopback, and any other address, cannot be reached."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        addresses = (f"('127.0.0.1', {port})", "('1.1.1.1', 53)")
        connect = "import socket; socket.create_connection({}, 2); print(1)"
        for output in attempt(*(f'{PYTHON} -c "{connect.format(each)}" 2>&1' for each in addresses)):
            assert "Error" in output


def test_privileges_are_not_gained():
    """No command becomes another user, makes namespaces, changes mounts, or traces the supervisor."""
    trace = "import ctypes; print('' if ctypes.CDLL(None).ptrace(16, 1, 0, 0) else 'gained')"
    tried = (
        "unshare -r echo gained",
        "unshare -rm mount -t tmpfs none /tmp && echo gained",
        "mount -t tmpfs none /usr && echo gained",
        "umount /workspace && echo gained",
        "mknod x b 8 0 && echo gained",
        "chroot / echo gained",
        "nsenter -t 1 -a echo gained",
        "su -c 'echo gained' </dev/null",
        f'{PYTHON} -c "{trace}"',
    )

    assert [text for text, output in zip(tried, attempt(*tried), strict=True) if "gained" in output] == []


def test_sessions_do_not_hide_processes():
    """Processes that leave their session count; a shell without a further process can still kill them."""
    bomb = "i=0; while [ $i -lt 100 ]; do setsid sleep 98763 & i=$((i+1)); done; wait"
    count = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c 'sleep 9876[3]'"

    # A killed process is there until the system lets it run once more, which takes a while on a busy machine.
    gone = f"until [ $({count}) = 0 ]; do sleep 0.01; done; echo gone"

    output, _, after = attempt(bomb, "kill -9 -1", gone, limits=Limits(processes=32, memory_mb=256))

    assert "fork" in output
    assert after == "gone\n"


def test_memory_of_many_processes_counts_together():
    """Ten processes with a part of the limit each pass it, and are killed."""
    program = f"{PYTHON} -c 'x = bytearray(40 * 2**20); print(len(x), flush=True); import time; time.sleep(20)'"
    limits = Limits(memory_mb=128, processes=64)

    async def run():
        workspace = await BubblewrapBackend(BubblewrapConfig(), Resources()).start(WorkspaceSpec(limits=limits))
        try:
            text = " & ".join([program] * 8) + " & wait"
            result = await workspace.exec(Command(argv=("/bin/sh", "-c", text), timeout_s=30.0))
            assert (result.limit, result.timed_out) == ("memory", False)
        finally:
            await workspace.close()

    asyncio.run(run())


def test_paths_of_processes_cannot_be_used_for_files():
    """`read` and `write` run as the agent: they reach neither the supervisor's memory nor its streams."""

    async def run():
        workspace = await BubblewrapBackend(BubblewrapConfig(), Resources()).start(WorkspaceSpec())
        try:
            for path in (
                "/proc/1/mem",
                "/proc/1/fd/3",
                "/proc/1/fd/4",
                "/proc/self/fd/3",
                "/dev/tty",
                "/proc/1/oom_adj",
            ):
                with pytest.raises(WorkspaceFileError):
                    await workspace.write(path, b"x" * 100)
            assert (await workspace.exec(Command(argv=("echo", "alive")))).stdout == b"alive\n"
        finally:
            await workspace.close()

    asyncio.run(run())
