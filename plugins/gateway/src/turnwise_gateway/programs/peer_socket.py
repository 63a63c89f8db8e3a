"""Finds the socket at the other end of a connection of this machine, which Linux names by its inode."""

from __future__ import annotations

import os
import socket
import struct
from functools import cache
from typing import Any, Final

from attrs import define, field

Address = tuple[Any, ...]
"""Of a socket: an IP address, a port, and in IPv6 two numbers more."""

_SOCK_DIAG: Final = 4
_BY_FAMILY: Final = 20
_HEADER: Final = struct.Struct("=IHHII")
_REQUEST: Final = struct.Struct("=BBBxI")
_PORTS: Final = struct.Struct("!HH")
_ANY_INTERFACE_AND_COOKIE: Final = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
_ALL_STATES: Final = 0xFFFFFFFF
_INODE_AT: Final = _HEADER.size + 4 + 48 + 16
_ANSWER_BYTES: Final = 1 << 13


@define(eq=False)
class SocketFinder:
    """
    Asks the kernel for single sockets; `/proc/net/tcp` takes milliseconds, since it lists all of them.

    It keeps one descriptor, so that it also works when the process has no further one. One thread may use it.
    """

    _kernel: socket.socket = field(
        factory=lambda: socket.socket(getattr(socket, "AF_NETLINK", -1), socket.SOCK_RAW, _SOCK_DIAG), init=False
    )
    _number: int = field(default=0, init=False)

    def find_inode(self, client: Address, server: Address) -> int:
        """
        Return the inode of a client's socket; 0 if the client has closed it.

        Args:
            client: address of the client, which is in the network namespace of this process.
            server: address of the accepted socket.

        Raises:
            OSError: the system does not tell.
        """
        family = socket.AF_INET6 if ":" in client[0] else socket.AF_INET
        ends = _PORTS.pack(client[1], server[1]) + _pad(family, client[0]) + _pad(family, server[0])
        body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ALL_STATES) + ends + _ANY_INTERFACE_AND_COOKIE
        self._number = (self._number + 1) & 0xFFFFFFFF
        self._kernel.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, 1, self._number, 0) + body)
        # The kernel answers inside of `send`, so nothing is waited for here.
        answer = self._kernel.recv(_ANSWER_BYTES, socket.MSG_DONTWAIT)
        if _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
            return 0  # there is no such connection any more
        inode: int = struct.unpack_from("=I", answer, _INODE_AT)[0]
        return inode

    def close(self) -> None:
        """Free the descriptor."""
        self._kernel.close()


@cache
def can_find_inodes() -> bool:
    """Return whether this system tells the inodes of sockets, and the files of processes."""
    try:
        finder = SocketFinder()
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
            client.connect(listener.getsockname())
            with listener.accept()[0] as accepted:
                inode = finder.find_inode(accepted.getpeername(), accepted.getsockname())
            name = os.readlink(f"/proc/self/fd/{client.fileno()}")
        finder.close()
    except OSError:
        return False
    return name == f"socket:[{inode}]"


def _pad(family: int, address: str) -> bytes:
    return socket.inet_pton(family, address.partition("%")[0]).ljust(16, b"\0")
