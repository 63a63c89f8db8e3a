"""Gives an outside program the workspace of its episode, which the tools of the run share with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from attrs import define

from turnwise import Episode, Resources
from turnwise.errors import ConfigError
from turnwise_workspaces.config import WorkspaceConfig
from turnwise_workspaces.owner import OwnedWorkspace
from turnwise_workspaces.use import EpisodeWorkspaces, WorkspaceUse, find_tools, make_use


@define(eq=False)
class ProgramWorkspaces:
    """
    The workspaces for the programs of a run.

    Attributes:
        use: the workspaces.
        tool: name of a tool that opens them; empty if the run has no tools `workspace`.
    """

    use: WorkspaceUse
    tool: str = ""

    async def close_kept(self) -> None:
        """End the warm workspaces; those of tools end with the tools, too."""
        await self.use.owner.warm.close()

    @asynccontextmanager
    async def open(self, episode: Episode) -> AsyncIterator[OwnedWorkspace]:
        """
        Return the workspace of an episode. It ends with the block, or when the tools are released that share it.

        Raises:
            InfrastructureError: it does not start.
        """
        if self.tool:
            yield await EpisodeWorkspaces(self.use, self.tool).open(episode)
        else:
            async with self.use.workspace(episode.task) as workspace:
                yield workspace


def choose_workspaces(config: WorkspaceConfig, resources: Resources) -> ProgramWorkspaces:
    """
    Return the workspaces for the programs of a run, which are the ones of its tools if it has them.

    Raises:
        ConfigError: the options do not fit the backend or the tools, or the backend runs no programs.
        PluginError: the backend is unknown, or cannot be built.
    """
    tools = find_tools(resources)
    if tools is not None and config != WorkspaceConfig():
        raise ConfigError("the tools 'workspace' of the run have the options of the workspace; write {} here")
    chosen = ProgramWorkspaces(make_use(config, resources)) if tools is None else ProgramWorkspaces(*tools)
    if not chosen.use.owner.backend.capabilities.programs:
        raise ConfigError(f"the backend {chosen.use.config.backend.name!r} runs no programs of agents")
    return chosen
