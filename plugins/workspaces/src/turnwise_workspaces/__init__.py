"""
Workspaces: an isolated place with files and processes for each episode.

It adds the kind `workspaces`, whose parts are backends; registers the backends `bubblewrap` and `containers`, the tools
`workspace`, the command `turnwise workspaces`, and a diagnostic.
"""

from __future__ import annotations

from turnwise import Command as CommandLine
from turnwise import Diagnostic, HookSpecs, NoConfig, Registry, Resources, Tool, hookimpl
from turnwise_workspaces import workspace
from turnwise_workspaces.config import BubblewrapConfig, ContainersConfig, WorkspaceToolsConfig
from turnwise_workspaces.workspace import (
    Capabilities,
    Command,
    ExecResult,
    Limits,
    Orphan,
    Programs,
    Snapshot,
    Snapshots,
    Workspace,
    WorkspaceBackend,
    WorkspaceFileError,
    WorkspaceSpec,
)

__all__ = [
    "Capabilities",
    "Command",
    "ExecResult",
    "Limits",
    "Orphan",
    "Programs",
    "Snapshot",
    "Snapshots",
    "Workspace",
    "WorkspaceBackend",
    "WorkspaceFileError",
    "WorkspaceSpec",
]


def make_bubblewrap(config: BubblewrapConfig, resources: Resources) -> WorkspaceBackend:
    """Build the backend of boxes."""
    from turnwise_workspaces.bubblewrap import BubblewrapBackend

    return BubblewrapBackend(config, resources)


def make_containers(config: ContainersConfig, resources: Resources) -> WorkspaceBackend:
    """Build the backend of containers."""
    from turnwise_workspaces.containers import ContainersBackend

    return ContainersBackend(config, resources)


def make_tools(config: WorkspaceToolsConfig, resources: Resources) -> tuple[Tool, ...]:
    """Build the tools of a workspace; see `turnwise_workspaces.tools`."""
    from turnwise_workspaces.tools import make_tools

    return make_tools(config, resources)


def make_command(config: NoConfig, resources: Resources) -> CommandLine:
    """Build the command `workspaces`."""
    from turnwise_workspaces.command import WorkspacesCommand

    return WorkspacesCommand(config, resources)


@hookimpl
def add_hookspecs(specs: HookSpecs) -> None:
    """Add the hook of backends."""
    specs.add(workspace.register_workspaces, part="workspace backend", contract=WorkspaceBackend)


@hookimpl
def register_workspaces(registry: Registry[WorkspaceBackend]) -> None:
    """Register boxes, which need nothing but bubblewrap, and containers."""
    registry.add("bubblewrap", make_bubblewrap, config=BubblewrapConfig)
    registry.add("containers", make_containers, config=ContainersConfig)


@hookimpl
def register_tools(registry: Registry[Tool | tuple[Tool, ...]]) -> None:
    """Register the tools of a workspace."""
    registry.add("workspace", make_tools, config=WorkspaceToolsConfig)


@hookimpl
def register_commands(registry: Registry[CommandLine]) -> None:
    """Register `turnwise workspaces`."""
    registry.add("workspaces", make_command)


def make_diagnostic(_config: NoConfig, _resources: Resources) -> Diagnostic:
    """Return the checks of this machine: a module with a function `diagnose` is a `Diagnostic`."""
    from turnwise_workspaces import diagnosis

    return diagnosis


@hookimpl
def register_diagnostics(registry: Registry[Diagnostic]) -> None:
    """Register the checks of boxes and containers."""
    registry.add("workspaces", make_diagnostic)
