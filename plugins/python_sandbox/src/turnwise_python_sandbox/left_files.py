"""
Removes the directories of this process when it has ended, however it ends.

A separate process does it, since a killed one cannot. That process is no child of this one: Ray, for example, kills the
direct children of an actor together with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from typing import Final

from turnwise_python_sandbox.box import tree_removal
from turnwise_python_sandbox.box.tree_removal import remove_tree

_NAME_BYTES: Final = 8


class Remover:
    """The process that removes directories; it runs while there are some. Its methods are safe in threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paths: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None

    def add(self, path: str) -> None:
        """Let a directory be removed after the end of this process. Call it before you create the directory."""
        with self._lock:
            self._paths.append(path)
            if self._process is not None and self._write(path):
                return
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", tree_removal.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                cwd="/",
            )
            self._process.wait()  # its fork goes on
            self._write(*self._paths)

    def discard(self, path: str) -> None:
        """Forget a directory that does not exist any more."""
        with self._lock:
            if path in self._paths:
                self._paths.remove(path)
            if self._paths or self._process is None:
                return
            self._write("")
            # Not its input: a fork of this process may have that open, too.
            assert self._process.stdout is not None
            self._process.stdout.read()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process = None

    def _write(self, *paths: str) -> bool:
        """Name directories, or "" for the end; return False if somebody has killed the process."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"".join(os.fsencode(path) + b"\0" for path in paths))
            self._process.stdin.flush()
        except OSError:
            return False
        return True


_REMOVER: Final = Remover()


def create_directory(prefix: str) -> str:
    """Create an empty temporary directory, which `remove_directory` removes, or the end of this process."""
    path = os.path.join(tempfile.gettempdir(), f"{prefix}{os.urandom(_NAME_BYTES).hex()}")
    _REMOVER.add(path)
    os.mkdir(path, 0o700)
    return path


def remove_directory(path: str) -> None:
    """Remove a directory with all that programs have left in it."""
    remove_tree(path)
    _REMOVER.discard(path)
