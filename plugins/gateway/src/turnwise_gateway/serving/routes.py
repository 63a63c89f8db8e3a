"""The routes of the control port of `turnwise gateway serve`."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from attrs import asdict, define, evolve, field

from turnwise import Task
from turnwise.errors import DataError
from turnwise.types import JsonDict
from turnwise_gateway.agents.agent import show_task
from turnwise_gateway.config import AGENT_NAME
from turnwise_gateway.control.atif import describe_session
from turnwise_gateway.control.control_server import RequestError, build_app, json_reply, read_body, read_failure, tell
from turnwise_gateway.control.scores import ControlError, Verdict
from turnwise_gateway.control.session_routes import find_session, score_session, show_session
from turnwise_gateway.dialects.strict_json import write_json
from turnwise_gateway.server import ServerOptions
from turnwise_gateway.serving.session_service import ServedSession, SessionService
from turnwise_task_files import read_tasks


def build_serving_app(
    service: SessionService, secret: str, options: ServerOptions, load: Callable[[], list[Task]]
) -> web.Application:
    """
    Return the application of the control port.

    Args:
        service: opens the sessions.
        secret: bearer token of every request; the control key of a session opens the routes of that session as well.
        options: names by which requests may address the server.
        load: reads the data set, at the first session that names a row of it.
    """
    routes = _Routes(service, load)
    return build_app(
        [
            web.post("/sessions", routes.open),
            web.get("/sessions", routes.list),
            web.get("/sessions/{id}", routes.show),
            web.delete("/sessions/{id}", routes.end),
            web.post("/sessions/{id}/score", routes.score),
            web.post("/sessions/{id}/fail", routes.fail),
        ],
        secret,
        options,
        routes.find_key,
    )


@define(eq=False)
class _Routes:
    service: SessionService
    load: Callable[[], list[Task]]
    _tasks: dict[str, Task] | None = field(default=None, init=False)
    _loading: asyncio.Lock = field(factory=asyncio.Lock, init=False)

    def find_key(self, request: web.Request) -> str | None:
        session = self.service.find(request.match_info.get("id", ""))
        return None if session is None else session.control_key

    async def open(self, request: web.Request) -> web.Response:
        body = await read_body(request, {"uid", "task"})
        served = await self.service.request(_for_session(await self._find_task(body)))
        client = served.client
        session = {"id": served.names.id, "control_key": served.control_key, **asdict(client)}
        return json_reply(200, {"session": session, "task": show_task(served.session.episode.task)})

    async def list(self, _request: web.Request) -> web.Response:
        sessions = [
            {
                "id": each.names.id,
                "uid": each.names.uid,
                "rollout_n": each.names.rollout_n,
                "num_turns": len(each.transcript),
                "status": "open" if each.outcome is None else each.outcome["status"],
            }
            for each in self.service.sessions()
        ]
        return json_reply(200, {"stats": self.service.stats(), "sessions": sessions})

    async def show(self, request: web.Request) -> web.Response:
        served = find_session(self.service, request)
        if "format" in request.query:
            return show_session(served, request, self.service.model_name())
        return json_reply(200, _describe(served))

    async def score(self, request: web.Request) -> web.Response:
        async def complete(_session: ServedSession, _score: float, _metrics: dict[str, float]) -> Verdict:
            return Verdict.ACCEPTED  # the end of the session is all that its episode waits for

        return await score_session(find_session(self.service, request), request, complete)

    async def fail(self, request: web.Request) -> web.Response:
        served = find_session(self.service, request)
        reason, owner, _body = await read_failure(request)
        if served.ended.is_set():
            return tell(Verdict.LATE)
        served.fail(owner, reason or "the agent gave no reason")
        return tell(Verdict.ACCEPTED)

    async def end(self, request: web.Request) -> web.Response:
        """End a session, and wait until its episode is in the file of results."""
        served = find_session(self.service, request)
        served.end()
        await served.written.wait()
        return json_reply(200, _describe(served))

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


def _describe(served: ServedSession) -> JsonDict:
    return {**describe_session(served), "lineage": served.describe_lineage(), "episode": served.outcome}
