"""
Workers of a run that share one control port and one pool, beside the file that announces them.

Each worker holds a lock on a separate file, which the system drops when the worker dies, so the others know who is
alive. The first worker makes the pool's file and the secret; the last one that leaves removes everything.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from attrs import asdict, define, field, frozen

from turnwise.errors import InfrastructureError
from turnwise_gateway.control.announcement import write_private
from turnwise_task_pool.config import PoolConfig

HOST: Final = "127.0.0.1"
_BACKLOG: Final = 1024
_BIND_S: Final = 3.0
"""Time for the last worker of an earlier set to close the port."""


@frozen(kw_only=True)
class SharedAccess:
    """
    The things that all workers at a control port have in common.

    Attributes:
        pool: file of the pool, on this machine.
        keeps_pool: the file stays after the run.
        secret: of the control port.
        port: number of the control port.
        host: name of the machine.
    """

    pool: str
    keeps_pool: bool
    secret: str
    port: int
    host: str

    def remove_pool(self) -> None:
        """Remove the file of the pool, unless it stays."""
        if not self.keeps_pool:
            shutil.rmtree(Path(self.pool).parent, ignore_errors=True)


@define(eq=False)
class PullSite:
    """
    A worker's place among the workers that share a control port.

    Attributes:
        options: of the control port.
        name: of this worker, unlike all others.
        access: what all workers have in common, once this one has joined.
        own_socket: for requests of other workers.
        shared_socket: for requests of agents; the system hands each connection to one of the workers.
    """

    options: PoolConfig
    name: str = field(factory=lambda: secrets.token_hex(6), init=False)
    access: SharedAccess = field(init=False)
    own_socket: socket.socket = field(init=False)
    shared_socket: socket.socket = field(init=False)
    _lock: int = field(default=-1, init=False)

    @property
    def file(self) -> Path:
        """The file that announces the control port to agents."""
        return Path(self.options.control_file).absolute()

    @property
    def url(self) -> str:
        """Address of the control port, once this worker has joined."""
        return _url(self.shared_socket)

    @property
    def _folder(self) -> Path:
        return _folder_of(self.file)

    def join(self) -> None:
        """
        Join the workers at the control port, or open it as the first one.

        Raises:
            InfrastructureError: the workers are on another machine.
            OSError: a file or the port cannot be opened.
        """
        with self._locked():
            try:
                self._join()
            except BaseException:
                self._leave()
                raise

    def _join(self) -> None:
        known = self._read_access() if self.peers() else None
        if known is not None and known.host != socket.gethostname():
            raise InfrastructureError(
                f"{self.file} belongs to workers on {known.host!r}: agents that pull need all workers on one machine"
            )
        if known is None:
            self._clear()
            if self.options.control_port:
                _check_free(self.options.control_port)
        self.own_socket = _listen(0, shared=False)
        self.shared_socket = _listen(known.port if known else self.options.control_port, shared=True)
        secret = os.environ.get(self.options.secret_variable) or secrets.token_urlsafe(32)
        kept = self.options.pool_file
        if kept is not None:
            kept.absolute().parent.mkdir(parents=True, exist_ok=True)
        self.access = known or SharedAccess(
            pool=str(kept.absolute() if kept else Path(tempfile.mkdtemp(prefix="turnwise-pool-")) / "pool.sqlite"),
            keeps_pool=kept is not None,
            secret=secret,
            port=self.shared_socket.getsockname()[1],
            host=socket.gethostname(),
        )
        write_private(self._folder / "access", json.dumps(asdict(self.access)))
        # With its lock from the start: a file without one is that of a dead worker.
        mine, partial = self._member(self.name), self._folder / f"{self.name}.partial"
        self._lock = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, json.dumps(_url(self.own_socket)).encode())
        partial.replace(mine)
        write_private(self.file, json.dumps({"url": self.url, "secret": self.access.secret}))

    def leave(self) -> None:
        """Leave the other workers; the last one takes the announcement of the port with it."""
        with self._locked():
            self._leave()

    def _leave(self) -> None:
        if self._lock >= 0:
            self._member(self.name).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1
        if not self.peers():
            self.file.unlink(missing_ok=True)

    def clean(self) -> None:
        """Remove the pool's file, unless another worker uses it."""
        with self._locked():
            if self.peers():
                return
            known = self._read_access()
            self.access.remove_pool()
            if known in (None, self.access):  # None: another one has removed the folder, and this lock made it anew
                # The lock's file too: whoever waits for the lock looks whether its file is still there.
                shutil.rmtree(self._folder, ignore_errors=True)

    def peers(self) -> dict[str, str]:
        """Return the addresses of the other workers that are alive, by name."""
        found = find_workers(self.file)
        found.pop(self.name, None)
        return found

    def find_dead(self) -> list[str]:
        """Return the names of workers that died; nothing is left of workers that have left."""
        paths = sorted(self._folder.glob("*.worker"))
        return [path.stem for path in paths if path.stem != self.name and not _is_locked(path)]

    def forget(self, name: str) -> None:
        """Remove the file of a dead worker."""
        self._member(name).unlink(missing_ok=True)

    def _member(self, name: str) -> Path:
        return self._folder / f"{name}.worker"

    def _clear(self) -> None:
        """Remove what killed workers of an earlier run have left."""
        if (known := self._read_access()) is not None:
            known.remove_pool()
        for path in [*self._folder.glob("*.worker"), *self._folder.glob("*.partial")]:
            path.unlink(missing_ok=True)

    def _read_access(self) -> SharedAccess | None:
        try:
            return SharedAccess(**json.loads((self._folder / "access").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other workers from joining and leaving meanwhile."""
        while True:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._folder / "lock"
            try:
                lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            except FileNotFoundError:  # the last worker has just removed the folder
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if _is_at(lock, path):
                    yield
                    return
            finally:
                os.close(lock)


def find_workers(control_file: Path) -> dict[str, str]:
    """Return the addresses of the workers at a control port that are alive, by name."""
    found = {}
    for path in sorted(_folder_of(control_file).glob("*.worker")):
        if _is_locked(path):
            with suppress(OSError, ValueError):  # it has just left
                found[path.stem] = str(json.loads(path.read_text()))
    return found


def _folder_of(control_file: Path) -> Path:
    return control_file.with_name(f"{control_file.name}.workers")


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _is_locked(path: Path) -> bool:
    """Return whether a worker holds the lock of a file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _check_free(port: int) -> None:
    """Raise an `OSError` if somebody else listens at a port: workers of one run share it, but runs do not."""
    end = time.monotonic() + _BIND_S
    while time.monotonic() < end:
        with suppress(OSError):
            _listen(port, shared=False).close()
            return
        time.sleep(0.05)
    _listen(port, shared=False).close()


def _listen(port: int, *, shared: bool) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind((HOST, port))
        listening.listen(_BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def _url(listening: socket.socket) -> str:
    return f"http://{HOST}:{listening.getsockname()[1]}"
