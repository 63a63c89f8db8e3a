"""Connections from inside a workspace to a socket of this process, and programs whose output is handed over."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest
from boxes import why_no_boxes
from images import ENGINE, IMAGE, RUN_OPTIONS, why_no_containers

from turnwise import Resources
from turnwise_workspaces import Command, WorkspaceSpec
from turnwise_workspaces.bubblewrap import BubblewrapBackend
from turnwise_workspaces.config import BubblewrapConfig, ContainersConfig
from turnwise_workspaces.containers import ContainersBackend

CLIENT = """
import socket, struct, sys, threading

def connect():
    return socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20)

def read_all(s):
    parts = []
    while part := s.recv(65536):
        parts.append(part)
    return b"".join(parts)

def ask(data):
    with connect() as s:
        s.sendall(data)
        s.shutdown(socket.SHUT_WR)
        return read_all(s)
"""
BODY = "bytes(range(256)) * 1024"


@pytest.fixture(
    params=[
        pytest.param("bubblewrap", marks=pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())),
        pytest.param("containers", marks=pytest.mark.slow),
    ]
)
def make_backend(request):
    """Return the backend and the specification of a workspace with Python."""
    if request.param == "bubblewrap":
        return lambda: (BubblewrapBackend(BubblewrapConfig(), Resources()), WorkspaceSpec())
    if reason := why_no_containers():
        pytest.skip(reason)
    config = ContainersConfig(command=ENGINE, run_options=RUN_OPTIONS)
    spec = WorkspaceSpec(image=IMAGE, mounts={"/usr": "/usr", "/lib": "/lib", "/lib64": "/lib64"})
    return lambda: (ContainersBackend(config, Resources()), spec)


def talk(make_backend, script, answer):
    """Run a client in a workspace against a server here; return its output."""

    async def run():
        backend, spec = make_backend()
        workspace = await backend.start(spec)
        try:
            with await workspace.listen() as listener:
                port = listener.getsockname()[1]
                async with await asyncio.start_server(answer, sock=listener):
                    argv = ("/usr/bin/python3", "-c", CLIENT + script, str(port))
                    result = await workspace.exec(Command(argv=argv, timeout_s=60.0))
            assert result.exit_code == 0, result.stdout.decode()
            return result.stdout.decode()
        finally:
            await workspace.close()

    return asyncio.run(run())


async def echo(reader, writer):
    """Send back what comes, after its end."""
    data = await reader.read()
    writer.write(data)
    await writer.drain()
    writer.close()


def test_large_bodies_of_several_connections_pass(make_backend):
    """Eight connections at once send 256 KB, close their half, and then read as much."""
    script = f"""
found = []
threads = [threading.Thread(target=lambda n=n: found.append(ask(bytes([n]) + {BODY}) == bytes([n]) + {BODY}))
           for n in range(8)]
[each.start() for each in threads]
[each.join() for each in threads]
print(found)
"""
    assert talk(make_backend, script, echo) == f"{[True] * 8}\n"


def test_streams_pass_while_they_are_made(make_backend):
    """The client reads the first part before it asks for the second one on the same connection."""

    async def answer(reader, writer):
        while line := await reader.readline():
            writer.write(line.upper())
            await writer.drain()
        writer.close()

    script = """
with connect() as s:
    for word in (b"one", b"two"):
        s.sendall(word + b"\\n")
        print(s.recv(100))
"""
    assert talk(make_backend, script, answer) == "b'ONE\\n'\nb'TWO\\n'\n"


def test_a_reset_of_the_server_reaches_the_client(make_backend):
    """It is no clean end, which a client would take for a whole response."""

    async def answer(reader, writer):
        await reader.readexactly(1)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    script = """
try:
    with connect() as s:
        s.sendall(b"x")
        print(s.recv(100))
except ConnectionResetError:
    print("reset")
"""
    assert talk(make_backend, script, answer) == "reset\n"


def test_a_reset_of_the_client_reaches_the_server(make_backend):
    """So a call whose client has left can be ended."""
    ends = []

    async def answer(reader, writer):
        try:
            ends.append(await reader.read())
        except ConnectionResetError:
            ends.append("reset")
        writer.close()

    script = """
s = connect()
s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
s.close()
with connect() as s:
    s.shutdown(socket.SHUT_WR)
    read_all(s)
"""
    talk(make_backend, script, answer)
    assert sorted(ends, key=str) == [b"", "reset"]


def test_the_output_of_a_program_is_handed_over(make_backend):
    """All of it, by stream, and none is in the result."""

    async def run():
        backend, spec = make_backend()
        workspace = await backend.start(spec)
        try:
            pieces = {"out": bytearray(), "err": bytearray()}
            script = "import sys; sys.stdout.write('o' * 3000000); sys.stderr.write('e' * 70000); sys.exit(7)"
            command = Command(argv=("/usr/bin/python3", "-c", script), max_output_bytes=10)
            result = await workspace.run(command, lambda stream, piece: pieces[stream].extend(piece))
            assert (result.exit_code, result.stdout, result.stderr, result.truncated) == (7, b"", b"", False)
            assert (bytes(pieces["out"]), bytes(pieces["err"])) == (b"o" * 3000000, b"e" * 70000)
        finally:
            await workspace.close()

    asyncio.run(run())


def test_mounts_are_shown_and_read_only(make_backend):
    """A file and a folder of this machine, at other places, with none of the folder around them."""

    async def run():
        backend, spec = make_backend()
        mounts = {**spec.mounts, "/opt/agent": "/usr/share/misc", "/workspace/hosts": "/usr/bin/env"}
        workspace = await backend.start(WorkspaceSpec(image=spec.image, mounts=mounts))
        try:
            text = (
                "ls /opt; cmp hosts /usr/bin/env && echo same; (echo x > /opt/agent/x || rm -f hosts) 2>/dev/null; ls"
            )
            result = await workspace.exec(Command(argv=("/bin/sh", "-c", text)))
            assert result.stdout.split() == [b"agent", b"same", b"hosts"]
        finally:
            await workspace.close()

    asyncio.run(run())
