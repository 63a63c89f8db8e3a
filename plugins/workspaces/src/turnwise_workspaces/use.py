"""The workspaces of a run in one process: the options, and the owner that starts and ends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from attrs import define

from turnwise import Episode, Resources, Task
from turnwise.errors import ConfigError, InfrastructureError, PluginError
from turnwise_workspaces.backends import build_backend
from turnwise_workspaces.config import WorkspaceConfig
from turnwise_workspaces.mounts import check_mounts
from turnwise_workspaces.owner import OwnedWorkspace, WorkspaceOwner
from turnwise_workspaces.slots import Slots
from turnwise_workspaces.task_columns import TaskWorkspace, read_files, read_workspace
from turnwise_workspaces.workspace import WorkspaceSpec


@define(eq=False)
class WorkspaceUse:
    """
    The workspaces of a run.

    Attributes:
        config: the options.
        owner: starts and ends the workspaces.
    """

    config: WorkspaceConfig
    owner: WorkspaceOwner

    async def open(self, task: Task) -> OwnedWorkspace:
        """
        Start the workspace of an episode; `owner.close` ends it.

        Raises:
            InfrastructureError: as `WorkspaceOwner.open` says, or a deadline came first. The model is not to blame, and
                an episode that is graded in spite of it would have a reward for nothing.
        """
        try:
            return await self.owner.open(self.spec(task))
        except asyncio.CancelledError as error:
            raise InfrastructureError("the time was over before the workspace had started") from error

    @asynccontextmanager
    async def workspace(self, task: Task) -> AsyncIterator[OwnedWorkspace]:
        """
        Start a workspace that lives until the end of the block. An end that fails is only logged.

        Raises:
            InfrastructureError: as `open` says.
        """
        opened = await self.open(task)
        try:
            yield opened
        finally:
            try:
                await self.owner.close(opened)
            except InfrastructureError as error:
                structlog.get_logger().warning("workspace did not end in order", error=str(error))

    def spec(self, task: Task | None = None) -> WorkspaceSpec:
        """
        Return the workspace of a task.

        Raises:
            InfrastructureError: the task's columns have something else, which is not the model's doing.
        """
        config = self.config
        own = TaskWorkspace() if task is None else read_workspace(task)
        files = {path: text.encode(errors="surrogateescape") for path, text in config.files.items()}
        return WorkspaceSpec(
            image=own.image or config.image,
            folder=own.folder or config.folder,
            folders=own.folders,
            files=files if task is None else files | read_files(task, config.files_column),
            environment={**config.environment, **own.environment},
            mounts={path: str(source.absolute()) for path, source in config.mounts.items()},
            limits=config.limits,
            network=own.network or config.network,
            boot_s=config.boot_s,
        )


def find_tools(resources: Resources) -> tuple[WorkspaceUse, str] | None:
    """
    Return the workspaces that the tools of a run share, and the name of one of the tools; None without such tools.

    Raises:
        ConfigError: the run has the tools more than once, so an episode has two workspaces.
    """
    found: dict[WorkspaceUse, str] = {}
    for name, tool in resources.tools.items():
        if isinstance(key := getattr(tool, "session_key", None), WorkspaceUse):
            found.setdefault(key, name)
    if len(found) > 1:
        raise ConfigError("the run has the tools 'workspace' more than once")
    return next(iter(found.items()), None)


@define(eq=False)
class EpisodeWorkspaces:
    """
    The workspaces of episodes, which an agent or a reward shares with the tools of the run.

    Attributes:
        use: the workspaces.
        tool: name of a tool that opens them.
    """

    use: WorkspaceUse
    tool: str

    async def open(self, episode: Episode) -> OwnedWorkspace:
        """
        Return the workspace of an episode, which ends when the tools are released; it starts now if no call has come.

        Raises:
            InfrastructureError: it does not start.
            PluginError: the tool is wrapped, so that its session is something else.
        """
        session = await episode.open_tool(self.tool)
        if not isinstance(session, OwnedWorkspace):
            raise PluginError(f"tool {self.tool!r} is wrapped, and its session is no workspace: {session!r}")
        return session


def find_workspaces(resources: Resources, *, snapshots: bool = False) -> EpisodeWorkspaces:
    """
    Return the workspaces of a run, for an agent or a reward to ask for when it is built, before any episode.

    Args:
        resources: of the run.
        snapshots: they must have the methods of `Snapshots`.

    Raises:
        ConfigError: the run has no tools `workspace`, or their backend takes no snapshots.
    """
    if (found := find_tools(resources)) is None:
        raise ConfigError("the run has no tools 'workspace'; add them to 'tools'")
    use, tool = found
    if snapshots and not use.owner.backend.capabilities.snapshots:
        raise ConfigError(f"the backend {use.config.backend.name!r} takes no snapshots, which this run needs")
    return EpisodeWorkspaces(use, tool)


def make_use(config: WorkspaceConfig, resources: Resources) -> WorkspaceUse:
    """
    Build the backend and the owner of its workspaces.

    Raises:
        ConfigError: the options do not fit the backend.
        PluginError: the backend is unknown, or cannot be built.
    """
    slots = Slots(config.state_folder, config.max_workspaces, config.wait_s)
    backend = build_backend(config.backend, resources)
    owner = WorkspaceOwner(backend, slots, boot_tries=config.boot_tries, close_s=config.close_s, num_warm=config.warm)
    use = WorkspaceUse(config, owner)
    spec = use.spec()
    if spec.mounts and not backend.capabilities.mounts:
        raise ConfigError(f"mounts: the backend {config.backend.name!r} has none")
    if spec.network not in (known := backend.capabilities.networks):
        values = " or ".join(map(repr, known))
        raise ConfigError(f"network: the backend {config.backend.name!r} knows {values}, not {spec.network!r}")
    check_mounts(spec)
    backend.check(spec)
    return use
