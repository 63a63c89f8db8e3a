"""Options of the agent `external`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from attrs import field, frozen, validators

from turnwise.config.parts import CodePlace
from turnwise_gateway.session.options import SessionOptions
from turnwise_workspaces.config import WorkspaceConfig

AGENT_NAME: Final = "external"
_more_than_0 = validators.optional(validators.gt(0.0))


@frozen(kw_only=True)
class AgentLimits(SessionOptions):
    """
    The rules of sessions, and limits of the agents in them.

    Attributes:
        session_s: seconds that an attempt may take; None leaves it to `rollout.deadlines.episode_s`.
        start_s: seconds until the first call; None for no limit.
        idle_s: seconds without a call; None for no limit.
        exit_grace_s: seconds that the agent gets to end after a call was refused for lack of budget, or a
            tool has ended the episode.
    """

    session_s: float | None = field(default=None, validator=_more_than_0)
    start_s: float | None = field(default=None, validator=_more_than_0)
    idle_s: float | None = field(default=None, validator=_more_than_0)
    exit_grace_s: float = field(default=10.0, validator=validators.gt(0.0))


@frozen(kw_only=True)
class ExternalConfig(AgentLimits):
    """
    The agent's program, and the rules and limits of its sessions.

    Attributes:
        command: program and arguments to start for each episode; it finds the model in its environment. `python` is the
            interpreter of this process, unless the program runs in a workspace.
        function: `module:name`, or `./file.py:name` of a file that `modules` lists, to call instead, in the worker's
            process: an `async def agent(task, client)`.
        workspace: runs the program inside a workspace of its episode, from which it reaches its session and nothing
            else; None runs it beside the worker.
        environment: more variables for the program.
        inherit: names of variables of the worker that the program gets besides `program.INHERITED`; `all` passes on all
            of them, with every secret of the run. In a workspace it gets the named ones alone; `all` leaves out
            `program.INHERITED` there, which are about this machine.
        bind_keys: lets a session answer only the processes of the program that it gave its key to; None does so for a
            `command` on Linux.
        keep_requests: folder for a file with the requests of each session, for `turnwise gateway replay`; None keeps
            none.
    """

    command: tuple[str, ...] = ()
    function: CodePlace = field(default=CodePlace(""))
    workspace: WorkspaceConfig | None = None
    environment: Mapping[str, str] = field(factory=dict)
    inherit: tuple[str, ...] | Literal["all"] = ()
    bind_keys: bool | None = None
    keep_requests: Path | None = None

    def __attrs_post_init__(self) -> None:
        """Check that there is one agent; `ValueError` when there is none, or several."""
        if bool(self.command) == bool(self.function):
            raise ValueError("set one of command and function; agents that run elsewhere need the agent task_pool")
        if self.workspace is not None and not self.command:
            raise ValueError("workspace needs command: a function runs in the process of the worker")
        if self.function and not all(part.strip() for part in self.function.rpartition(":")):
            raise ValueError(f"function must have the form 'module:name', not {self.function!r}")
