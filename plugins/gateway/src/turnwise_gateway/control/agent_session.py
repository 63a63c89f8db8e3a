"""Sessions of agents that run elsewhere, as a control port opens, scores, shows and ends them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from attrs import asdict, define, field

from turnwise.errors import InfrastructureError
from turnwise.types import JsonDict
from turnwise_gateway.calls import DeliveredTurn
from turnwise_gateway.control.scores import ScoreBoard, Verdict
from turnwise_gateway.dialects import DIALECTS
from turnwise_gateway.host import ModelClient, RunningServer
from turnwise_gateway.programs.program import ProgramFailedError
from turnwise_gateway.replay.request_file import log_session
from turnwise_gateway.session.session import Session, Spawn


@define(eq=False)
class AgentSession:
    """
    An attempt of an outside agent at an episode.

    Attributes:
        id: names the session in requests.
        session: answers the calls.
        attempt: number of this attempt at the episode, from 1.
        worker: name that the agent gave itself; empty for none.
        client: for the agent; set by `open`.
        control_key: lets its owner score, show and end this session alone.
        scores: reported from outside.
        failure: ends the episode as failed.
        outcome: the end of the episode, once it is in a file of results.
        written: set with `outcome`.
    """

    id: str
    session: Session
    attempt: int = 1
    worker: str = ""
    client: ModelClient = field(init=False)
    control_key: str = field(factory=lambda: secrets.token_urlsafe(32), init=False, repr=False)
    scores: ScoreBoard = field(factory=ScoreBoard, init=False)
    failure: Exception | None = field(default=None, init=False)
    outcome: JsonDict | None = field(default=None, init=False)
    written: asyncio.Event = field(factory=asyncio.Event, init=False)
    _calls: set[asyncio.Task[None]] = field(factory=set)
    _door: ExitStack = field(factory=ExitStack, init=False)

    @classmethod
    def open(
        cls,
        name: str,
        server: RunningServer,
        make_session: Callable[[Spawn], Session],
        group: asyncio.TaskGroup,
        keep_requests: Path | None = None,
        **more: Any,
    ) -> Self:
        """
        Open a session, whose calls come to a server until `close`.

        Args:
            name: of the session.
            server: of the agents' port; it listens.
            make_session: returns the session that answers the calls, given the function that starts its turns.
            group: runs the turns; it outlives every call.
            keep_requests: folder for a file with the requests; None keeps none.
            more: other attributes.
        """
        calls: set[asyncio.Task[None]] = set()

        def spawn(call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            task = group.create_task(call)
            calls.add(task)
            task.add_done_callback(calls.discard)
            return task

        opened = cls(name, make_session(spawn), calls=calls, **more)
        log_session(opened.session, keep_requests)
        opened.client = opened._door.enter_context(server.open(name, opened.session))
        return opened

    @property
    def ended(self) -> asyncio.Event:
        """Set at the end; then calls are refused."""
        return self.session.door.ended

    @property
    def transcript(self) -> Sequence[DeliveredTurn]:
        """The turns of its records, each once, in the order in which they were appended."""
        return self.session.transcript

    def describe_access(self) -> JsonDict:
        """Return everything that an agent and its scorer need to use the session."""
        return {"id": self.id, "control_key": self.control_key, **asdict(self.client)}

    async def wait(self) -> None:
        """Wait for the end; calls in flight end with it. Raises `failure`."""
        try:
            await self.ended.wait()
        finally:
            self.end()
            for call in self._calls:
                call.cancel()
        if self.failure is not None:
            raise self.failure

    def end(self) -> None:
        """Refuse further calls and scores."""
        self.session.door.end()
        self.scores.close()

    def fail(self, owner: str, reason: str) -> Verdict:
        """End the session as failed; `LATE` if it has ended otherwise."""
        if self.ended.is_set():
            return Verdict.LATE if self.failure is None else Verdict.REPEATED
        self.failure = InfrastructureError(reason) if owner == "infra" else ProgramFailedError(reason)
        self.end()
        return Verdict.ACCEPTED

    def close(self, *, is_trained: bool = True) -> None:
        """End the session and describe its records; a second call does nothing."""
        self.end()
        self._door.close()
        self.session.close(is_trained=is_trained)

    def reported_score(self) -> object:
        """Return the scores that were reported, in the form that `ScoreBoard.reported` describes."""
        return self.scores.reported(num_records=1 + max(self._records(), default=-1))

    def find_turn(self, turn: int | str) -> str | None:
        """
        Return the id by which scores name a turn; None unless a client has read it and it has tokens.

        Args:
            turn: its number in the transcript, or its id; clients see the id behind the prefix of their dialect.
        """
        if isinstance(turn, int):
            turn = self.transcript[turn].reply.id if turn < len(self.transcript) else ""
        for dialect in DIALECTS:
            turn = turn.removeprefix(dialect.id_prefix)
        if not self.session.deliver(turn):
            return None
        return next((each.reply.id for each in self.transcript if each.reply.id == turn and _has_tokens(each)), None)

    def has_record(self, record: int) -> bool:
        """Return whether a client has read a turn of a record."""
        return record in self._records()

    def _records(self) -> set[int]:
        return {int(turn.reply.provenance["record"]) for turn in self.transcript if _has_tokens(turn)}


def _has_tokens(turn: DeliveredTurn) -> bool:
    """Return whether the turn has a token on which a score can lie."""
    return len(turn.reply.token_ids) > 0
