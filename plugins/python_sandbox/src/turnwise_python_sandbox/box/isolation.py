"""
Interfaces of the two kinds of isolation, which create a workspace for each program.

Both tiers also apply Landlock, seccomp and rlimits; see `confinement`.
"""

from __future__ import annotations

from typing import Protocol

from turnwise_python_sandbox.box.messages import Launch


class Workspace(Protocol):
    """The file system and namespaces of one program, from before its fork until after its death."""

    path: str
    """The program's working directory, as the program sees it."""

    def restore_server(self) -> None:
        """Undo, in the server, the preparations for the fork."""

    def enter(self) -> None:
        """Move this process, the fork, irreversibly into the workspace."""

    def exceeds_quota(self, pid: int) -> bool:
        """Return whether a running program has more on disk than its limits allow."""

    def is_full(self) -> bool:
        """Return whether the files of an exited program had reached a limit."""

    def remove(self) -> int | None:
        """Remove the program's files; return the id of a child process that still does so, if that may take long."""


class Isolation(Protocol):
    """Creates workspaces; a fork server has one for its whole life."""

    def create_workspace(self, launch: Launch) -> Workspace:
        """Prepare a workspace. Until `Workspace.restore_server`, the caller forks nothing but the program."""

    def close(self) -> None:
        """Remove the files that all workspaces share, after every program has exited."""
