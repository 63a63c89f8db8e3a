"""Requirements of backends of workspaces: the network of commands, and the programs of agents that use it."""

from __future__ import annotations

import asyncio
import os

from turnwise_testing.checks.workspace import WORKSPACES as WORKSPACES
from turnwise_testing.checks.workspace import WorkspaceProbe, check, count, shell
from turnwise_testing.probes.engine import expect, expect_equal
from turnwise_workspaces import Command, Programs


@check
async def check_has_no_network(probe: WorkspaceProbe) -> None:
    """With `network: none` there is no interface but the loopback."""
    async with probe.workspace() as workspace:
        lines = (await shell(workspace, "cat /proc/net/dev")).stdout.decode().splitlines()[2:]
        expect_equal([line.split(":")[0].strip() for line in lines], ["lo"], "the network's interfaces")


@check
async def check_has_the_network_of_the_host(probe: WorkspaceProbe) -> str | None:
    """With `network: host`, where a backend knows it, commands are in the network of this machine."""
    if "host" not in probe.make_backend().capabilities.networks:
        return "the backend knows no network but `none`"
    async with probe.workspace(network="host") as workspace:
        found = await shell(workspace, "readlink /proc/self/ns/net")
        expect_equal(found.stdout.decode().strip(), os.readlink("/proc/self/ns/net"), "the network of a command")
    return None


@check
async def check_programs_have_their_output_and_listener(probe: WorkspaceProbe) -> None:
    """With the capability `programs` a command's whole output is handed over, and a socket listens at the loopback."""
    if not probe.make_backend().capabilities.programs:
        return
    async with probe.workspace() as workspace:
        expect(isinstance(workspace, Programs), f"{type(workspace).__name__} has no methods of Programs")
        assert isinstance(workspace, Programs)
        pieces = {"out": bytearray(), "err": bytearray()}
        text = "head -c 2000000 /dev/zero; echo error >&2; echo $WORD >&2; exit 7"
        command = Command(
            argv=("/bin/sh", "-c", text), timeout_s=20.0, max_output_bytes=1, environment={"WORD": "a\nb"}
        )
        result = await workspace.run(command, lambda stream, piece: pieces[stream].extend(piece))
        expect_equal((result.exit_code, result.stdout, result.stderr), (7, b"", b""), "the result of the program")
        expect_equal(bytes(pieces["err"]), b"error\na b\n", "its standard error")
        expect_equal(bytes(pieces["out"]), bytes(2000000), "its output")
        with await workspace.listen() as listener:
            host, port = listener.getsockname()
            expect_equal((host, port > 0), ("127.0.0.1", True), "the address of the listener")
        async with asyncio.TaskGroup() as group:
            command = Command(argv=("/bin/sh", "-c", "exec sleep 98766"), timeout_s=60.0)
            running = group.create_task(workspace.run(command, lambda *_: None))
            while not await count(workspace, "sleep 98766"):  # noqa: ASYNC110 - a process outside cannot set an event of this loop
                await asyncio.sleep(0.05)
            running.cancel()
        async with asyncio.timeout(20):
            while await count(workspace, "sleep 98766"):  # noqa: ASYNC110 - a process outside cannot set an event of this loop
                await asyncio.sleep(0.05)
