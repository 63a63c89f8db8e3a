"""The control port of `turnwise gateway serve`: its own route opens sessions."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from attrs import define, evolve, field

from turnwise import Task
from turnwise.errors import DataError
from turnwise_gateway.agents.agent import show_task
from turnwise_gateway.config import AGENT_NAME
from turnwise_gateway.control.control_server import RequestError, json_reply, read_body
from turnwise_gateway.control.scores import ControlError
from turnwise_gateway.control.session_routes import build_control_app
from turnwise_gateway.dialects.strict_json import write_json
from turnwise_gateway.server import ServerOptions
from turnwise_gateway.serving.session_service import SessionService
from turnwise_task_files import read_tasks


def build_serving_app(
    service: SessionService, secret: str, options: ServerOptions, load: Callable[[], list[Task]]
) -> web.Application:
    """
    Return the application of the control port.

    Args:
        service: opens the sessions.
        secret: as for `build_control_app`.
        options: likewise.
        load: reads the data set, at the first session that names a row of it.
    """
    opening = _Opening(service, load)
    return build_control_app(service, secret, options, [web.post("/sessions", opening.open)])


@define(eq=False)
class _Opening:
    service: SessionService
    load: Callable[[], list[Task]]
    _tasks: dict[str, Task] | None = field(default=None, init=False)
    _loading: asyncio.Lock = field(factory=asyncio.Lock, init=False)

    async def open(self, request: web.Request) -> web.Response:
        body = await read_body(request, {"uid", "task"})
        session = await self.service.request(_for_session(await self._find_task(body)))
        return json_reply(200, {"session": session.describe_access(), "task": show_task(session.session.episode.task)})

    async def _find_task(self, body: dict[str, Any]) -> Task:
        """Return the task of a request: a row of the data set, the row in it, or one without messages."""
        uid, row = body.get("uid"), body.get("task")
        if row is None and uid is None:
            return Task(messages=(), uid="session")
        if row is None:
            return await self._find_row(uid)
        if uid is not None or not isinstance(row, dict):
            raise ControlError("give 'uid', the name of a row of the data set, or 'task', a row as an object")
        try:
            return await asyncio.to_thread(_read_row, row)
        except DataError as error:
            raise ControlError(f"'task' is no row of a data set: {error}") from error

    async def _find_row(self, uid: object) -> Task:
        async with self._loading:
            if self._tasks is None:
                try:
                    self._tasks = {task.uid: task for task in await asyncio.to_thread(self.load)}
                except DataError as error:
                    raise RequestError(409, "no_data", f"the data set cannot be read: {error}") from error
        if not isinstance(uid, str) or uid not in self._tasks:
            raise RequestError(404, "unknown", f"the data set has no row with the uid {uid!r}")
        return self._tasks[uid]


def _for_session(task: Task) -> Task:
    """Return a task that names no agent, since a session runs every task; `ControlError` if it names another agent."""
    if task.agent_name not in ("", AGENT_NAME):
        hint = "leave 'agent_name' out, or set data.columns: {agent_name: null}"
        raise ControlError(f"the row names the agent {task.agent_name[:40]!r}, and a session runs it: {hint}")
    return evolve(task, agent_name="")


def _read_row(row: dict[str, Any]) -> Task:
    """Read a row as the reader of data sets does, so that it has the same forms and checks."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        Path(file.name).write_bytes(write_json(row))
        (task,) = read_tasks(file.name)
    return task
