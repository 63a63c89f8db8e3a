"""The Python that the sandbox runs: its files, and the directories that an unprivileged user cannot enter."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Final

from attrs import frozen

from turnwise_python_sandbox.result import SandboxUnavailableError

_DESCRIBE: Final = """
import json, os, site, sys
print(json.dumps({
    "version": sys.version_info[:2],
    "executable": os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable),
    "home": os.path.realpath(sys.base_prefix),
    "packages": [os.path.realpath(path) for path in site.getsitepackages() if os.path.isdir(path)],
}))
"""
_OLDEST_VERSION: Final = (3, 11)
_SYSTEM_PATHS: Final = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
_TIMEOUT_S: Final = 60
DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
PACKAGE: Final = str(Path(__file__).resolve().parent)
BOOTSTRAP: Final = (
    "import sys, types; package = types.ModuleType('turnwise_python_sandbox'); package.__path__ = [sys.argv[1]]; "
    "sys.modules[package.__name__] = package; import importlib; "
    "importlib.import_module('turnwise_python_sandbox.box.' + sys.argv[2]).main(sys.argv[3])"
)
"""Imports a module of `box` without the parent package, which needs turnwise, and calls its `main`."""


@frozen(kw_only=True)
class Interpreter:
    """
    A Python installation.

    Attributes:
        executable: the real path, not a virtual environment's link.
        home: its prefix, which holds the standard library.
        packages: directories of installed packages.
    """

    executable: str
    home: str
    packages: tuple[str, ...]

    def list_readable_paths(self, extra: tuple[str, ...]) -> tuple[str, ...]:
        """Return the files and directories that programs may read, `extra` included; none lies within another."""
        libraries = tuple(f"{self.home}/{name}" for name in ("lib", "lib64"))
        candidates = (*_SYSTEM_PATHS, *libraries, *self.packages, self.executable, *extra)
        paths = {path for path in candidates if os.path.exists(path)}
        return tuple(sorted(p for p in paths if not any(p.startswith(f"{other}/") for other in paths)))


def find_interpreter(python: str) -> Interpreter:
    """Ask an interpreter for its paths; raise `SandboxUnavailableError` if it cannot run or is too old."""
    command = [python or sys.executable, "-I", "-c", _DESCRIBE]
    try:
        answer = subprocess.run(command, capture_output=True, check=True, timeout=_TIMEOUT_S, env={})
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailableError(f"cannot run the interpreter {command[0]!r}: {error}") from error
    found = json.loads(answer.stdout)
    if tuple(found["version"]) < _OLDEST_VERSION:
        version = ".".join(map(str, found["version"]))
        raise SandboxUnavailableError(f"{command[0]} is Python {version}, but the sandbox needs 3.11 or later")
    return Interpreter(executable=found["executable"], home=found["home"], packages=tuple(found["packages"]))


def find_blocking_directory(path: str, uid: int) -> str | None:
    """
    Return the topmost directory that a user may not enter on the way to a path; None if there is none.

    The path itself counts if it is a directory: nothing can show its contents to a user who may not enter it.
    """
    for each in (*reversed(Path(path).parents), Path(path)):
        if _is_closed(each, uid):
            return str(each)
    return None


def check_enterable(path: str, uid: int) -> None:
    """Raise `SandboxUnavailableError` for a directory that programs need and that their user may not enter."""
    if _is_closed(Path(path), uid):
        raise SandboxUnavailableError(
            f"user {uid}, who runs the programs, may not enter {path}; let other users read and enter it (chmod o+rx)"
        )


def _is_closed(path: Path, uid: int) -> bool:
    found = path.stat()
    bit = stat.S_IXUSR if found.st_uid == uid else stat.S_IXOTH
    return stat.S_ISDIR(found.st_mode) and not found.st_mode & bit
