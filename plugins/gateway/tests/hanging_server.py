"""A server that never ends a response, and says when a request came and when its client left."""

from __future__ import annotations

import socket
import threading

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\na\r\ndata: half\r\n"


class HangingServer:
    """
    Takes one request; a context manager.

    Attributes:
        url: for clients, with the version.
        asked: set when the request has come.
        left: set when the client has closed the connection.
        response: sent at once; empty for none.
    """

    def __init__(self, response: bytes = b"") -> None:
        self.response = response
        self.asked, self.left = threading.Event(), threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the test is over without a request
            return
        with connection:
            try:
                if connection.recv(1 << 16):
                    connection.sendall(self.response)
                    self.asked.set()
                while connection.recv(1 << 16):
                    pass
            except ConnectionError:
                pass
        self.left.set()

    def __enter__(self) -> HangingServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Closing alone does not wake a thread in `accept`.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
