"""
Requirements of every backend of workspaces, as plain functions without pytest.

A check takes a `WorkspaceProbe` and raises `AssertionError` with a text that describes the failure. Of the image the
checks use a POSIX shell with `cat`, `grep`, `head`, `sleep`, `tr` and `wc`, and for snapshots the usual programs for
files with `cksum`, `mkfifo`, `readlink`, `stat` and `tar`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from attrs import evolve, field, frozen

from turnwise.errors import ConfigError, InfrastructureError
from turnwise_testing.checks.check import Check, register
from turnwise_testing.checks.part import PartChecks
from turnwise_testing.probes.engine import expect, expect_equal
from turnwise_workspaces import (
    Command,
    ExecResult,
    Limits,
    Workspace,
    WorkspaceBackend,
    WorkspaceFileError,
    WorkspaceSpec,
)

_SECRET: Final = "TURNWISE_PROBE_SECRET"
_COUNT: Final = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; echo; done 2>/dev/null | grep -c '^{}'"


@frozen(kw_only=True)
class WorkspaceExample:
    """
    How a backend is tested.

    Attributes:
        spec: of the workspaces, for example with an image.
        leftovers: lists what the backend has on this machine now: processes, containers, mounts, folders.
    """

    spec: WorkspaceSpec = field(factory=WorkspaceSpec)
    leftovers: Callable[[], Sequence[str]] = tuple


@frozen(kw_only=True)
class WorkspaceProbe:
    """
    The probe of a backend.

    Attributes:
        make_backend: builds it, as the registered factory does.
        example: the workspaces to test.
    """

    make_backend: Callable[[], WorkspaceBackend]
    example: WorkspaceExample = field(factory=WorkspaceExample)

    @asynccontextmanager
    async def workspace(self, **changes: Any) -> AsyncIterator[Workspace]:
        """Start a workspace, and close it at the end."""
        workspace = await self.make_backend().start(evolve(self.example.spec, **changes))
        try:
            yield workspace
        finally:
            await workspace.close()

    def expect_nothing_left(self) -> None:
        """Fail when the backend has left something on this machine."""
        left = list(self.example.leftovers())
        expect(not left, f"left behind: {left}")


async def shell(workspace: Workspace, text: str, **changes: Any) -> ExecResult:
    """Run a text by the shell."""
    return await workspace.exec(Command(argv=("/bin/sh", "-c", text), **{"timeout_s": 20.0, **changes}))


async def shell_until_late(workspace: Workspace, text: str, num_bytes: int, **changes: Any) -> ExecResult:
    """
    Return the result of a text that runs longer than its time.

    A busy machine may give it too little time for its first `num_bytes` of output, so it then runs again with more.
    """
    for seconds in (1.0, 5.0, 20.0):
        result = await shell(workspace, text, timeout_s=seconds, **changes)
        if len(result.stdout) >= num_bytes:
            break
    return result


def in_background(command: str) -> str:
    """
    Return shell text that starts a command in the background and waits until it runs.

    The child of a shell is a copy of the shell until it executes the command, which `count` does not see. On a busy
    machine, the shell may end before.
    """
    return f"{command} & until grep -q '^{command.split()[0]}' /proc/$!/cmdline; do :; done"


async def count(workspace: Workspace, command: str) -> int:
    """Return the number of processes whose command line starts with a text."""
    return int((await shell(workspace, _COUNT.format(command))).stdout)


WORKSPACE_CHECKS: dict[str, Check] = {}
"""Every check by the name of its function without `check_`."""
WORKSPACES = PartChecks(
    checks=WORKSPACE_CHECKS,
    probe=lambda part: WorkspaceProbe(make_backend=part.make, example=(*part.examples, WorkspaceExample())[0]),
)
check = register(WORKSPACE_CHECKS)


@check
def check_fulfils_the_protocol(probe: WorkspaceProbe) -> None:
    """The factory returns a backend, which says what it can do and takes the specification of the example."""
    backend = probe.make_backend()
    expect(isinstance(backend, WorkspaceBackend), f"{type(backend).__name__} is no WorkspaceBackend")
    backend.check(probe.example.spec)
    if not backend.capabilities.images:
        try:
            backend.check(evolve(probe.example.spec, image="busybox"))
        except ConfigError as error:
            expect("\n" not in str(error), f"the error has several lines: {error}")
        else:
            raise AssertionError("a backend without images took one")


@check
async def check_commands_have_their_results(probe: WorkspaceProbe) -> None:
    """Output comes in order, or apart, with the exit code; input, environment and folder are the given ones."""
    async with probe.workspace(environment={"ONE": "1 ü"}) as workspace:
        both = await shell(workspace, "echo a; echo b >&2; echo c; exit 3")
        expect_equal((both.stdout, both.stderr, both.exit_code), (b"a\nb\nc\n", b"", 3), "output in order")
        apart = await shell(workspace, "echo a; echo b >&2", separate=True)
        expect_equal((apart.stdout, apart.stderr, apart.exit_code), (b"a\n", b"b\n", 0), "output apart")
        given = await shell(workspace, 'cat; echo "$ONE $TWO"; pwd', stdin=b"in\n", environment={"TWO": "2 'x'"})
        folder = probe.example.spec.folder.encode()
        expect_equal(given.stdout, "in\n1 ü 2 'x'\n".encode() + folder + b"\n", "what the command was given")
        silent = await shell(workspace, "cat")
        expect_equal((silent.stdout, silent.exit_code), (b"", 0), "a command without input")


@check
async def check_bad_commands_are_results(probe: WorkspaceProbe) -> None:
    """A program that is missing or killed, and text that no program can get, are results with an exit code."""
    async with probe.workspace() as workspace:
        for argv in (("no-such-program",), ("/",), ("/bin/sh", "-c", "kill -9 $$"), ("/bin/sh", "-c", "echo \0")):
            result = await workspace.exec(Command(argv=argv))
            expect(result.exit_code not in (None, 0), f"{argv}: {result}")
        expect_equal((await shell(workspace, "echo alive")).stdout, b"alive\n", "the next command")


@check
async def check_time_out_kills_the_command(probe: WorkspaceProbe) -> None:
    """At the end of its time a command is killed with its children; what it wrote before is there."""
    async with probe.workspace() as workspace:
        result = await shell_until_late(workspace, "echo begin; sleep 98765 & sleep 98765", len("begin\n"))
        expect_equal((result.timed_out, result.exit_code), (True, None), "the time-out")
        expect_equal(result.stdout, b"begin\n", "the output before the time-out")
        expect_equal(await count(workspace, "sleep 98765"), 0, "processes of the killed command")


@check
async def check_background_processes_live_on(probe: WorkspaceProbe) -> None:
    """A command ends with its first process; what it leaves runs until `end_processes`, which spares the workspace."""
    async with probe.workspace() as workspace:
        ticks = "(while sleep 0.1; do echo tick; done) &"
        result = await shell(workspace, f"echo started; {ticks} {in_background('sleep 98765')}")
        expect(not result.timed_out, "a command waited for its background processes")
        expect(result.stdout.startswith(b"started\n"), f"the output: {result.stdout!r}")
        expect_equal(await count(workspace, "sleep 98765"), 1, "the process in the background")
        await workspace.end_processes()
        expect_equal(await count(workspace, "sleep 98765"), 0, "processes after end_processes")


@check
async def check_cancelled_command_is_killed(probe: WorkspaceProbe) -> None:
    """A call that is cancelled leaves no process, and the workspace serves the next one."""
    async with probe.workspace() as workspace, asyncio.TaskGroup() as group:
        seen = asyncio.Event()
        command = Command(argv=("/bin/sh", "-c", "echo begin; sleep 98765"))
        running = group.create_task(workspace.exec(command, lambda _data: seen.set()))
        await seen.wait()
        running.cancel()
        while await count(workspace, "sleep 98765"):  # noqa: ASYNC110 - the kernel sends no event when a process ends
            await asyncio.sleep(0.05)


@check
async def check_output_is_bounded(probe: WorkspaceProbe) -> None:
    """A flood is cut at `max_output_bytes`, to its beginning, and ends with its command's time."""
    async with probe.workspace() as workspace:
        flood = "while :; do echo 0123456789; done"
        result = await shell_until_late(workspace, flood, 1000, max_output_bytes=1000)
        expect_equal(result.stdout, (b"0123456789\n" * 100)[:1000], "the output")
        expect_equal((result.truncated, result.timed_out), (True, True), "the ends of a flood")


@check
async def check_output_streams(probe: WorkspaceProbe) -> None:
    """`on_output` gets the output while the command runs, and all that is kept."""
    pieces: list[bytes] = []
    came = asyncio.Event()

    def collect(data: bytes) -> None:
        pieces.append(data)
        came.set()

    async with probe.workspace() as workspace:
        command = Command(argv=("/bin/sh", "-c", "echo one; read x < fifo; echo two"), timeout_s=20.0)
        await shell(workspace, "mkfifo fifo")
        async with asyncio.TaskGroup() as group:
            running = group.create_task(workspace.exec(command, collect))
            await came.wait()
            await shell(workspace, "echo go > fifo")
        expect_equal(b"".join(pieces), running.result().stdout, "the pieces together")
        expect_equal(running.result().stdout, b"one\ntwo\n", "the output")


@check
async def check_calls_at_the_same_time(probe: WorkspaceProbe) -> None:
    """Commands of one workspace run at the same time, each with its own output."""
    async with probe.workspace() as workspace:
        await shell(workspace, "mkfifo fifo")
        async with asyncio.TaskGroup() as group:  # the first waits for the second
            reader = group.create_task(shell(workspace, "cat fifo"))
            group.create_task(shell(workspace, "echo met > fifo"))
            others = [group.create_task(shell(workspace, f"echo {number}")) for number in range(4)]
        expect_equal(reader.result().stdout, b"met\n", "what one command got from another")
        expect_equal([each.result().stdout for each in others], [b"%d\n" % n for n in range(4)], "their outputs")


@check
async def check_files_that_cannot_be_used(probe: WorkspaceProbe) -> None:
    """A missing file, a folder, a device, and a name that no file has are errors for the model."""
    async with probe.workspace() as workspace:
        for path in ("missing", ".", "/dev/zero", "x" * 5000, "a\0b", ""):
            for name, call in (
                ("read", lambda path=path: workspace.read(path, max_bytes=9)),
                ("write", lambda path=path: workspace.write(path, b"x")),
            ):
                if (name, path) == ("write", "missing"):
                    continue
                try:
                    await call()
                except WorkspaceFileError as error:
                    expect("\n" not in str(error), f"the error has several lines: {error}")
                else:
                    raise AssertionError(f"{name} of {path[:20]!r} did not fail")
        await workspace.write("deep/er/file", b"12345")
        expect_equal(await workspace.read("deep/er/file", max_bytes=2, offset=1), b"23", "a part of a file")


@check
async def check_starts_with_its_files(probe: WorkspaceProbe) -> None:
    """The files of the specification are there, and nothing of another workspace is."""
    binary = bytes(range(256))
    async with probe.workspace(files={"a/b.bin": binary, "c": b""}) as first, probe.workspace() as second:
        expect_equal(await first.read("a/b.bin", max_bytes=1000), binary, "a file of the specification")
        await first.write("/tmp/mine", b"1")
        found = await shell(second, "ls; ls /tmp")
        expect(b"a" not in found.stdout.split() and b"mine" not in found.stdout.split(), f"one sees the other: {found}")


@check
async def check_has_more_folders(probe: WorkspaceProbe) -> None:
    """The further folders of the specification are there, empty, and can be written."""
    async with probe.workspace(folders=("/more", "/deep/er")) as workspace:
        found = await shell(workspace, "ls -A /more /deep/er; echo 1 > /more/a && mkdir /deep/er/b && echo written")
        expect_equal((found.exit_code, found.stdout.split()[-1]), (0, b"written"), f"further folders: {found}")
        await workspace.write("/deep/er/c/d", b"2")
        expect_equal(await workspace.read("/more/a", max_bytes=9), b"1\n", "a file of a further folder")


@check
async def check_gets_nothing_of_this_process(probe: WorkspaceProbe) -> None:
    """No variable and no process of the host is in the workspace."""
    import os

    os.environ[_SECRET] = "1"
    try:
        async with probe.workspace() as workspace:
            found = await shell(workspace, f"env; ls /proc/{os.getpid()}/fd 2>&1")
            expect(_SECRET.encode() not in found.stdout, "a variable of the host is in the workspace")
            mine = await shell(workspace, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
            expect(b"pytest" not in mine.stdout, f"processes of the host are in the workspace: {mine.stdout!r}")
    finally:
        del os.environ[_SECRET]


@check
async def check_limits_hold(probe: WorkspaceProbe) -> None:
    """Bombs of processes, memory and files end, or are killed, and the workspace serves the next command."""
    limits = Limits(memory_mb=64, processes=32, disk_mb=16)
    async with probe.workspace(limits=limits) as workspace:
        await shell(workspace, "b() { b | b & b; }; b", timeout_s=2.0)
        await workspace.end_processes()
        memory = await shell(workspace, "x=$(head -c 500000000 /dev/zero | tr '\\0' a); echo ${#x}")
        expect(memory.exit_code != 0, f"500 MB of memory fit into 64 MiB: {memory}")
        if probe.make_backend().capabilities.disk_limit:
            disk = await shell(workspace, "head -c 100000000 /dev/zero > big; wc -c < big; rm big")
            size = int(disk.stdout.split()[-1])
            expect(size <= limits.disk_mb * 2**20, f"{size} bytes of files fit into {limits.disk_mb} MiB")
        expect_equal((await shell(workspace, "echo alive")).stdout, b"alive\n", "the command after the bombs")


@check
async def check_close_leaves_nothing(probe: WorkspaceProbe) -> None:
    """`close` ends everything, twice too, and also after `kill`; later calls are failures of the infrastructure."""
    backend = probe.make_backend()
    for is_killed in (False, True):
        workspace = await backend.start(probe.example.spec)
        await shell(workspace, "sleep 98765 & echo x > file")
        if is_killed:
            workspace.kill()
        await workspace.close()
        await workspace.close()
        workspace.kill()
        probe.expect_nothing_left()
        try:
            await shell(workspace, "echo no")
        except InfrastructureError:
            continue
        raise AssertionError("a workspace that is closed has run a command")


@check
async def check_lost_workspace_is_infrastructure(probe: WorkspaceProbe) -> None:
    """A command whose workspace goes away is no result: it raises `InfrastructureError`."""
    seen = asyncio.Event()
    async with probe.workspace() as workspace:
        command = Command(argv=("/bin/sh", "-c", "echo begin; sleep 98765"))

        async def run() -> bool:
            try:
                await workspace.exec(command, lambda _data: seen.set())
            except InfrastructureError:
                return True
            return False

        async with asyncio.TaskGroup() as group:
            running = group.create_task(run())
            await seen.wait()
            workspace.kill()
        expect(running.result(), "a command of a lost workspace has a result")


@check
async def check_cancelled_start_leaves_nothing(probe: WorkspaceProbe) -> None:
    """A start that is cancelled, at any time, leaves nothing."""
    backend = probe.make_backend()
    for delay_s in (0.0, 0.01, 0.1):
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(backend.start(probe.example.spec))
            await asyncio.sleep(delay_s)
            starting.cancel()
        if not starting.cancelled():
            await starting.result().close()
        async with asyncio.timeout(30):
            while probe.example.leftovers():  # noqa: ASYNC110 - a backend announces no end of its clean-up
                await asyncio.sleep(0.05)


@check
async def check_reaps_only_what_is_left(probe: WorkspaceProbe) -> None:
    """What this process has open is no orphan, and `reap` leaves it alone."""
    backend = probe.make_backend()
    async with probe.workspace() as workspace:
        await backend.reap()
        await backend.find_orphans()
        expect_equal((await shell(workspace, "echo alive")).stdout, b"alive\n", "the command after `reap`")
