"""The host's end of a box: sends requests to its supervisor, and resolves the calls that wait for the replies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from attrs import define

from turnwise.errors import InfrastructureError
from turnwise_workspaces.box.messages import Decoder, encode

_KEPT_ERRORS: Final = 4096
_GIVE_UP_S: Final = 5.0
Output = Callable[[str, bytes], None]
"""Gets the name of a stream and a piece of it."""


@define(eq=False)
class _Call:
    reply: asyncio.Future[dict[str, Any]]
    output: Output


class BoxChannel(asyncio.Protocol):
    """
    Speaks with the supervisor of a box, over the standard streams of the program that makes the box.

    No task reads and no thread waits: the event loop calls this object. So nothing has to be ended before the loop is,
    and `kill` works after its end.

    Args:
        command: of the program, which passes its standard streams on to the supervisor.
        passed: descriptors that it gets besides.

    Raises:
        OSError: the program cannot be started.
    """

    def __init__(self, command: Sequence[str], passed: Sequence[int]) -> None:
        loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        """Set when the program has exited; then all processes of the box are gone."""
        self.ready: asyncio.Future[None] = loop.create_future()
        self._calls: dict[int, _Call] = {}
        self._next = 0
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
        self._is_broken = False
        self._first_process = -1
        self._errors = os.memfd_create("turnwise-errors", os.MFD_CLOEXEC)
        self._socket, theirs = socket.socketpair()
        self._door, their_door = socket.socketpair()
        self._passed_door = their_door.fileno()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._errors,
                pass_fds=[*passed, self._passed_door],
                cwd="/",
                env={"PATH": os.defpath},
            )
        except BaseException:
            self._socket.close()
            self._door.close()
            os.close(self._errors)
            raise
        finally:
            theirs.close()
            their_door.close()
        self._program = os.pidfd_open(self._process.pid)
        loop.add_reader(self._program, self._take_exit)

    async def connect(self) -> None:
        """Begin to read."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._socket)

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for header, payload in self._decoder.feed(data):
                self._take(header, payload)
        except (ValueError, KeyError, TypeError):  # nothing but the supervisor can write there
            self.kill()

    def connection_lost(self, _error: Exception | None) -> None:
        self._fail()

    def _take_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._program)
        os.close(self._program)
        self._process.wait()  # it has exited
        self._fail()
        self.ended.set()
        fd, self._first_process = self._first_process, -1
        if fd >= 0:
            os.close(fd)

    # Called by the workspace

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Send the supervisor its settings."""
        self._write(json.dumps({**settings, "door": self._passed_door}).encode() + b"\n")

    async def take_socket(self) -> socket.socket:
        """
        Return a socket that the supervisor has made, which listens in the network of the box.

        Raises:
            InfrastructureError: the box is gone, or goes before it replies.
        """
        await self.ask({"do": "listen"})
        # The supervisor sends the socket before its reply, so this does not wait.
        _, descriptors, _, _ = socket.recv_fds(self._door, 1, 1, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
        return socket.socket(fileno=descriptors[0])

    def watch_first_process(self, info: int) -> None:
        """
        Remember the first process of the box, by a descriptor, because process ids are used again.

        Args:
            info: descriptor from which bubblewrap's description of the box can be read, if there is a box.
        """
        os.set_blocking(info, False)
        if self._first_process < 0:
            with contextlib.suppress(BlockingIOError, ValueError, ProcessLookupError):
                self._first_process = os.pidfd_open(json.loads(os.read(info, 4096))["child-pid"])

    async def ask(self, header: dict[str, Any], payload: bytes = b"", output: Output = lambda *_: None) -> Any:
        """
        Send a request and return the last reply; a cancellation cancels the request too.

        Raises:
            InfrastructureError: the box is gone, or goes before it replies.
        """
        if self._is_broken:
            raise self._loss()
        self._next += 1
        number = self._next
        call = self._calls[number] = _Call(asyncio.get_running_loop().create_future(), output)
        self._send({"id": number, **header}, payload)
        try:
            return await call.reply
        except asyncio.CancelledError:
            self._send({"id": number, "do": "cancel"})
            raise
        finally:
            del self._calls[number]

    def end_box(self) -> None:
        """Kill the first process of the box, and so all of them; then the program that made the box ends too."""
        if self._first_process < 0:
            self.kill()
            return
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._first_process, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the first process of the box and the program that made it, without waiting."""
        if self._first_process >= 0:
            self.end_box()
        if self._process.returncode is None:
            self._process.kill()

    async def give_up(self) -> None:
        """Kill a box that did not start, and wait until it is gone."""
        self.kill()
        try:
            async with asyncio.timeout(_GIVE_UP_S):
                await self.ended.wait()
        except TimeoutError:
            return  # it waits for a device, and dies later
        finally:
            self.close()

    def close(self) -> None:
        """Close the streams. Idempotent."""
        if self._transport is not None:
            self._transport.close()
        self._socket.close()
        self._door.close()
        fd, self._errors = self._errors, -1
        if fd >= 0:
            os.close(fd)

    def _send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        self._write(encode(header, payload))

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _take(self, header: dict[str, Any], payload: bytes) -> None:
        if "ready" in header:
            if not self.ready.done():
                self.ready.set_result(None)
            return
        call = self._calls.get(header["id"])
        if call is None or call.reply.done():  # it was cancelled
            return
        if "stream" in header:
            call.output(header["stream"], payload)
        else:
            call.reply.set_result(header)

    def _fail(self) -> None:
        self._is_broken = True
        waiting = [call.reply for call in self._calls.values()]
        futures: list[asyncio.Future[Any]] = [self.ready, *waiting]
        for each in futures:
            if not each.done():
                each.set_exception(self._loss())
                each.exception()  # marked as seen: a caller that was cancelled does not ask

    def _loss(self) -> InfrastructureError:
        text = os.pread(self._errors, _KEPT_ERRORS, 0) if self._errors >= 0 else b""
        lines = text.decode(errors="replace").strip().splitlines()
        return InfrastructureError("the box has ended" + (f": {lines[-1]}" if lines else ""))
