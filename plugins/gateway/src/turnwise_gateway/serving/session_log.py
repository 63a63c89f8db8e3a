"""
The file of the sessions that a gateway has opened: after a kill, the next process finds the sessions without an end.

Each line is about one session, at its opening or at its end. A line that a kill has cut off is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from attrs import asdict, define, frozen

from turnwise import Episode, Task
from turnwise.errors import DataError, describe
from turnwise_gateway.control.agent_session import AgentSession
from turnwise_gateway.private_files import append_private_line
from turnwise_gateway.server.session_directory import digest_key

SESSIONS_FILE: Final = "sessions.jsonl"


@frozen(kw_only=True)
class LoggedSession:
    """
    A session of an earlier process.

    Attributes:
        name: of the session.
        key_digest: of the agent's key.
        task: of its episode.
        rollout_n: of its episode.
        global_step: of its episode.
        validation: of its episode.
        is_over: the process has noted its end.
    """

    name: str
    key_digest: bytes
    task: Task
    rollout_n: int
    global_step: int
    validation: bool
    is_over: bool

    @property
    def uid(self) -> str:
        """Name of its episode."""
        return f"{self.task.uid}/{self.rollout_n}"


@define(eq=False)
class SessionLog:
    """
    Writes and reads the file of a folder.

    Attributes:
        path: of the file; it is made by the first session.
    """

    path: Path

    def note_opened(self, session: AgentSession) -> None:
        """Note a session before anybody has its key."""
        digest = digest_key(session.client.api_key.encode())
        self._write({"opened": session.id, "key": digest.hex(), **_describe(session.session.episode)})

    def note_ended(self, name: str) -> None:
        """Note that the episode of a session is written, or has nothing to write."""
        self._write({"ended": name})

    def read(self) -> list[LoggedSession]:
        """Return all sessions in the order of their opening; `DataError` if the file has something else."""
        try:
            lines = list(self._lines())
            ended = {line["ended"] for line in lines if "ended" in line}
            return [_read(line, is_over=line["opened"] in ended) for line in lines if "opened" in line]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self.path}: cannot be read: {describe(error)}") from error

    def _lines(self) -> Iterator[dict[str, Any]]:
        for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True) if self.path.exists() else ():
            if line.endswith("\n"):
                yield json.loads(line)

    def _write(self, line: dict[str, Any]) -> None:
        append_private_line(self.path, line)


def _describe(episode: Episode) -> dict[str, Any]:
    names = ("rollout_n", "global_step", "validation")
    return {"task": asdict(episode.task), **{name: getattr(episode, name) for name in names}}


def _read(line: dict[str, Any], *, is_over: bool) -> LoggedSession:
    task = line["task"]
    return LoggedSession(
        name=line["opened"],
        key_digest=bytes.fromhex(line["key"]),
        task=Task(**{**task, "messages": tuple(task["messages"])}),
        rollout_n=line["rollout_n"],
        global_step=line["global_step"],
        validation=line["validation"],
        is_over=is_over,
    )
