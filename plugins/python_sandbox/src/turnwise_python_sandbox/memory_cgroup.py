"""A memory cgroup for fork servers and their programs, where the user may create one (cgroup v2)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from turnwise_python_sandbox.result import SandboxUnavailableError

_PREFIX: Final = "turnwise-sandbox-"
_JOIN: Final = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


def create_cgroup(parent: str, memory_mb: int) -> str:
    """
    Create the cgroup of this process's fork servers, or return it; remove the cgroups that killed processes have left.

    Args:
        parent: directory of a cgroup that delegates the memory controller to its children.
        memory_mb: MiB that all programs may hold together, memory of the kernel included.

    Raises:
        SandboxUnavailableError: the parent does not delegate the controller, or this user may not create cgroups there.
    """
    own = Path(parent, f"{_PREFIX}{os.getpid()}")
    try:
        if "memory" not in Path(parent, "cgroup.subtree_control").read_text().split():
            raise SandboxUnavailableError(f"cgroup: {parent} does not give its children the memory controller")
        for left in Path(parent).glob(f"{_PREFIX}*"):
            if left != own:
                remove_cgroup(str(left))
        own.mkdir(exist_ok=True)
        (own / "memory.max").write_text(f"{memory_mb * 2**20}\n")
        if (own / "memory.swap.max").exists():  # the kernel may have been built or started without it
            (own / "memory.swap.max").write_text("0\n")
    except OSError as error:
        raise SandboxUnavailableError(f"cgroup: cannot use {parent}: {error.strerror}") from error
    return str(own)


def remove_cgroup(path: str) -> None:
    """Remove a cgroup; one with processes stays."""
    with contextlib.suppress(OSError):
        os.rmdir(path)


def run_in_cgroup(path: str, command: Sequence[str]) -> list[str]:
    """Return a command that joins the cgroup before it becomes the given command, so that no child is outside."""
    return ["/bin/sh", "-c", _JOIN, path, *command]
