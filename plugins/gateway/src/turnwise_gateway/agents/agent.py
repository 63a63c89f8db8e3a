"""
The agent `external`: runs an unmodified agent, as a program or a function, and records its calls.

An outside program cannot continue in the middle, so one step is the whole attempt, and an interrupted episode is run
again from its task.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final, cast

from attrs import define, field

from turnwise import Episode, Resources, State, Task
from turnwise.errors import ConfigError
from turnwise.types import Capabilities, JsonDict
from turnwise_gateway.agents.reported import check_turns
from turnwise_gateway.agents.watch import wait_for_agent
from turnwise_gateway.config import AgentLimits, ExternalConfig
from turnwise_gateway.control.scores import MAX_NUMBER
from turnwise_gateway.host import ModelClient, RunningServer, ServerHost
from turnwise_gateway.models import Endpoint
from turnwise_gateway.programs.callers import ProgramCallers
from turnwise_gateway.programs.keeper import KEEPER
from turnwise_gateway.programs.peer_socket import can_find_inodes
from turnwise_gateway.programs.program import INHERITED, Program, ProgramFailedError, inherited
from turnwise_gateway.programs.workspace_program import WorkspaceProgram
from turnwise_gateway.replay.request_file import log_session
from turnwise_gateway.session.comparison import check_conversations
from turnwise_gateway.session.grammars import GrammarWriter
from turnwise_gateway.session.parts import SessionParts
from turnwise_gateway.session.session import Session
from turnwise_workspaces.owner import OwnedWorkspace
from turnwise_workspaces.programs import ProgramWorkspaces, choose_workspaces

SCORE_MARK: Final = "TURNWISE_SCORE="
"""Start of a line of a program's output that reports its score."""
_MAX_VARIABLE: Final = 128 * 1024 - len("TURNWISE_TASK=") - 1
"""Bytes that Linux takes for one variable of a program, whose task may have pictures."""
_NUMBER: Final = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


AgentFunction = Callable[[Task, ModelClient], Awaitable[float | None]]


def build_parts(config: AgentLimits, resources: Resources) -> SessionParts:
    """Return the parts that the sessions of a run share; `ConfigError` if the run lacks one that the options need."""
    chat, reasoning = resources.chat, resources.reasoning
    if chat is None:
        raise ConfigError("agent 'external' renders prompts: the run needs a model with a chat template")
    for name, use in config.models.items():
        if isinstance(use, Endpoint) and use.api_key_env is not None and not os.environ.get(use.api_key_env):
            raise ConfigError(f"agent.models.{name}.api_key_env: there is no environment variable {use.api_key_env!r}")
    constrains = config.structured_output == "constrain"
    return SessionParts(
        chat=chat,
        parser=resources.parser,
        split=reasoning.split if reasoning is not None else None,
        settle=getattr(reasoning, "settled", None),
        tools=resources.tool_schemas,
        seed=resources.seed,
        template_options=resources.model.template_options,
        options=config,
        grammars=GrammarWriter.of(chat, resources.parser, reasoning) if constrains else None,
    )


def check_grammars(config: AgentLimits, engine: Capabilities) -> None:
    """Raise `ConfigError` if the sessions of a run need grammars, and its engine has none."""
    if config.structured_output == "constrain" and not engine.grammars:
        raise ConfigError(
            "agent.structured_output: constrain needs an engine with grammars, and the run's has none: vllm and sglang"
            " have them with engine.grammars: true, transformers with the package llguidance, and others never"
        )


@define(eq=False)
class ExternalAgent:
    """
    Runs an agent from outside for each episode. One object serves many episodes at once.

    Args:
        config: the agent, and the rules of its sessions.
        resources: the chat template, and perhaps a tool parser and a reasoning parser.

    Raises:
        ConfigError: the run has no chat template, or the function cannot be imported.
    """

    config: ExternalConfig
    resources: Resources
    parts: SessionParts = field(init=False)
    _function: AgentFunction | None = field(init=False)
    _binds_keys: bool = field(init=False)
    _workspaces: ProgramWorkspaces | None = field(init=False)
    _host: ServerHost = field(init=False)
    _servers: AsyncExitStack = field(factory=AsyncExitStack, init=False)

    resumable = False

    def __attrs_post_init__(self) -> None:
        self.parts = build_parts(self.config, self.resources)
        self._function = self._find_function() if self.config.function else None
        self._host = ServerHost(self.config.model)
        self._workspaces = self._find_workspaces()
        can_bind = bool(self.config.command) and can_find_inodes()
        if self.config.bind_keys and not can_bind:
            raise ConfigError("agent.bind_keys: only keys of programs (`command`) can be bound, and only on Linux")
        self._binds_keys = can_bind and self.config.bind_keys is not False

    def _find_workspaces(self) -> ProgramWorkspaces | None:
        config = self.config.workspace
        if config is None:
            return None
        try:
            return choose_workspaces(config, self.resources)
        except ConfigError as error:
            raise ConfigError(f"agent.workspace: {error}") from error

    def _find_function(self) -> AgentFunction:
        place = self.config.function
        try:
            found = self.resources.find_code(place)
        except ConfigError as error:
            raise ConfigError(f"agent.function: {place}: {str(error).removeprefix(f'{place}: ')}") from error
        if not callable(found):
            raise ConfigError(f"agent.function: {place}: it is {type(found).__name__}, expected an async function")
        return cast("AgentFunction", found)

    def check_engine(self, capabilities: Capabilities) -> None:
        check_grammars(self.config, capabilities)

    async def open(self) -> dict[str, str]:
        return {"agents": (await self._servers.enter_async_context(self._host.serve())).url}

    async def close(self) -> None:
        await self._servers.aclose()
        if self._workspaces is not None:
            await self._workspaces.close_kept()

    async def step(self, episode: Episode) -> State:
        async with self._host.serve() as server:
            if self._function is not None:
                return await self._attempt(episode, server)
            async with server.hold_program():
                if self._workspaces is None:
                    return await self._attempt(episode, server)
                async with self._workspaces.open(episode) as workspace:
                    return await self._attempt(episode, server, workspace)

    async def _attempt(self, episode: Episode, server: RunningServer, workspace: OwnedWorkspace | None = None) -> State:
        failure: Exception | None = None
        async with asyncio.TaskGroup() as calls:
            session = Session(episode, self.parts, secrets.token_hex(8), calls.create_task)
            log_session(session, self.config.keep_requests)
            callers = server.bind_callers(session.name) if self._binds_keys and workspace is None else None
            try:
                if workspace is None:
                    with server.open(session.name, session, callers) as client:
                        await self._run(session, client, callers)
                else:
                    with await workspace.listen() as listener:
                        async with server.open_at(listener, session.name, session) as client:
                            await self._run(session, client, workspace)
            except Exception as error:  # noqa: BLE001 - raised below: a task group would hide its class, and so its owner
                failure = error
            finally:
                session.close()
                failure = failure or session.error  # a listener may fail at the end
                if callers is not None:
                    callers.count(session.episode)
        await check_conversations(session.book)
        if failure is not None:
            raise failure
        return State.TERMINATED

    async def _run(self, session: Session, client: ModelClient, place: ProgramCallers | OwnedWorkspace | None) -> None:
        """Run the agent to its end, and note the score that it reports."""
        episode = session.episode
        if self._function is not None:
            agent = _call_function(self._function, episode, client)
        elif isinstance(place, OwnedWorkspace):
            agent = self._run_inside(session, client, place)
        else:
            agent = self._run_program(session, client, place)
        await wait_for_agent(agent, session, self.config)
        check_turns(session)

    async def _run_program(self, session: Session, client: ModelClient, callers: ProgramCallers | None) -> None:
        environment = {**inherited(self.config.inherit), **self._variables(session.episode, client)}
        name, *arguments = self.config.command
        # An environment that is not active has its `python` not on the path.
        command = (sys.executable if name == "python" else name, *arguments)
        with KEEPER.watch() as mark:
            program = await Program.start(command, environment, self._take_line(session.episode), mark)
            if callers is not None:
                callers.begin(program.process.pid, mark)
            # A child of the program may still call, and is no agent any more.
            code = await program.wait(session.refuse_calls)
        if code != 0:
            raise ProgramFailedError(program.describe_end(code))

    async def _run_inside(self, session: Session, client: ModelClient, workspace: OwnedWorkspace) -> None:
        wanted = os.environ.keys() - INHERITED if self.config.inherit == "all" else self.config.inherit
        named = {name: os.environ[name] for name in wanted if name in os.environ}
        environment = {**named, **self._variables(session.episode, client)}
        program = WorkspaceProgram(workspace, self.config.command, environment, self._take_line(session.episode))
        await program.run(session.refuse_calls, has_called=lambda: session.num_calls > 0)

    def _variables(self, episode: Episode, client: ModelClient) -> dict[str, str]:
        task = json.dumps(show_task(episode.task), ensure_ascii=False)
        if (num_bytes := len(task.encode())) > _MAX_VARIABLE:
            text = f"the task has {num_bytes} bytes, and TURNWISE_TASK holds {_MAX_VARIABLE}: agent.function takes more"
            raise ConfigError(text)
        return {**self.config.environment, **describe_client(client), "TURNWISE_TASK": task}

    @staticmethod
    def _take_line(episode: Episode) -> Callable[[str], None]:
        def take_line(line: str) -> None:
            if line.startswith(SCORE_MARK):
                report_score(episode, _read_score(line.removeprefix(SCORE_MARK).strip()))

        return take_line


async def _call_function(function: AgentFunction, episode: Episode, client: ModelClient) -> None:
    score = await function(episode.task, client)
    if score is not None:
        report_score(episode, float(score))


def report_score(episode: Episode, score: float) -> None:
    """Note the score that an agent gives its episode, for the reward `reported`; `ValueError` if no record holds it."""
    if not abs(score) <= MAX_NUMBER:
        raise ValueError(f"the agent reported the score {score}, which is too large or not finite")
    episode.memory["reported_score"] = score


def _read_score(text: str) -> float:
    # Stricter than `float`, which reads 1_0 as 10.
    if _NUMBER.fullmatch(text) is None:
        raise ValueError(f"the program reported the score {text[:40]!r}, which is not a number")
    return float(text)


def describe_client(client: ModelClient) -> dict[str, str]:
    """Return the environment of a program that calls the model."""
    return {
        "OPENAI_BASE_URL": client.openai_base_url,
        "OPENAI_API_KEY": client.api_key,
        "ANTHROPIC_BASE_URL": client.anthropic_base_url,
        "ANTHROPIC_AUTH_TOKEN": client.api_key,
        "TURNWISE_MODEL": client.model,
        "TURNWISE_MCP_URL": client.mcp_url,
    }


def show_task(task: Task) -> JsonDict:
    """Return a task as JSON values, without its ground truth: an agent must not read the answer."""
    return {"uid": task.uid, "messages": [dict(message) for message in task.messages], "extra": dict(task.extra)}
