"""Checks the files and folders of this machine that a workspace shows."""

from __future__ import annotations

import os
import posixpath
import stat
from pathlib import Path
from typing import Final

from turnwise.errors import ConfigError
from turnwise_workspaces.workspace import WorkspaceSpec

_RESERVED: Final = ("/dev", "/proc", "/sys")


def check_mounts(spec: WorkspaceSpec) -> None:
    """
    Check the mounts of a specification.

    Raises:
        ConfigError: one is not there, or cannot be where it should be.
    """
    for path, source in spec.mounts.items():
        place = f"mounts: {path}"
        if not path.startswith("/") or path != posixpath.normpath(path) or path == "/" or "\0" in path:
            raise ConfigError(f"mounts: expected an absolute path in the workspace, such as /opt/agent, got {path!r}")
        if is_under(path, _RESERVED):
            raise ConfigError(f"{place}: it is a folder of the system; choose a path such as /opt/agent")
        if is_under(spec.folder, (path,)):
            raise ConfigError(f"{place}: it would hide the working folder {spec.folder}, and is read-only")
        if not os.path.exists(source):
            raise ConfigError(f"{place}: there is no {source}")
        if not (os.path.isdir(source) or os.path.isfile(source)):
            raise ConfigError(f"{place}: {source} is neither a folder nor a file")
        if ":" in path or ":" in source or "," in path or "," in source:
            raise ConfigError(f"{place}: a path of a mount has no colon and no comma")


def find_closed(source: str) -> str:
    """Return the first folder on the way to a source, or that itself, that other users may not enter; empty if none."""
    way = Path(os.path.realpath(source))
    for each in (*reversed(way.parents), way):
        wanted = stat.S_IXOTH if each != way else stat.S_IROTH | (stat.S_IXOTH if each.is_dir() else 0)
        if each.stat().st_mode & wanted != wanted:
            return str(each)
    return ""


def is_under(path: str, folders: tuple[str, ...]) -> bool:
    """Return whether a path is one of some folders, or inside of one."""
    return any(f"{path}/".startswith(f"{folder}/") for folder in folders)
