"""Clients of simulated sessions: they converse, lose replies, ask again, leave, and report scores."""

import asyncio
import json
import re
from contextlib import suppress
from typing import Any
from zlib import crc32

from attrs import define, field, frozen
from session_scenarios import ADD, user
from simulated_network import Client, Network, Response

MARK = re.compile(r"T([0-9a-f]{8})")
"""The number in the text of a sampled turn; each turn has another one."""


def mark_of(content: str) -> str:
    found = MARK.search(content)
    return found[1] if found else ""


def value_of(mark: str) -> float:
    """Return the score of a turn."""
    return (int(mark, 16) % 2001 - 1000) / 8


@frozen(kw_only=True)
class Plan:
    """
    A client of a session.

    Attributes:
        name: of its conversation.
        prompt: its first message; clients with the same prompt take samples of it.
        turns: of each conversation.
        repeats: conversations with the prompt, one after the other.
        stream: replies are streams of events.
        keyed: requests have an `Idempotency-Key`.
        marks: repeated requests have the header of the SDKs.
        keeps: connections that stay open after a reply: `one`, which the next request uses, `all`, or `none`.
    """

    name: str
    prompt: str
    turns: int
    repeats: int = 1
    stream: bool = False
    keyed: bool = False
    marks: bool = True
    keeps: str = "one"


@frozen
class Read:
    """A reply that a client has read, and the request that it answers."""

    id: str
    request: str
    mark: str


@define(eq=False)
class Attempt:
    """
    The history of the clients of a session.

    Attributes:
        uid: of the task.
        session: name of the session.
        kind: of the scores: `none`, `session`, `records` or `turns`.
        fence: of its lease; a newer lease has a larger one.
        reads: replies that clients have read.
        required: replies that they had read before the agent reported its end.
        scores: accepted scores by the mark of the turn, or under an empty mark for the session.
        in_doubt: scores that were sent, without a response yet.
        is_ending: the agent has reported its end.
        is_completed: the report was accepted.
        is_altered: a client left a request, so other turns may have been sampled.
        violations: of promises that only a client sees.
    """

    uid: str
    session: str
    kind: str = "none"
    fence: int = 0
    reads: list[Read] = field(factory=list)
    required: list[Read] = field(factory=list)
    scores: dict[str, float] = field(factory=dict)
    in_doubt: list[tuple[str, float]] = field(factory=list)
    is_ending: bool = False
    is_completed: bool = False
    is_altered: bool = False
    violations: list[str] = field(factory=list)


class SessionOverError(Exception):
    """The session refuses calls."""


@define(eq=False)
class Control:
    """The control port, as an outside agent sees it."""

    network: Network
    url: str
    secret: str

    async def send(self, path: str, body: dict[str, Any] | None = None) -> Response:
        connection = self.network.connect(self.url)
        try:
            headers = {"Authorization": f"Bearer {self.secret}"}
            method = "GET" if body is None else "POST"
            return await connection.ask(self.url + path, method, headers, json.dumps(body or {}).encode())
        finally:
            connection.close()


@define(eq=False)
class Player:
    """The clients of one session."""

    network: Network
    attempt: Attempt
    url: str
    key: str
    control: Control | None = None
    _num_reports: int = 0

    async def play(self, plan: Plan) -> None:
        """Run a client to its end."""
        await asyncio.sleep(self.network.delay(1.0))
        connections: list[Client] = []
        with suppress(SessionOverError, ConnectionRefusedError):
            for repeat in range(plan.repeats):
                await self._converse(plan, f"{plan.name}.{repeat}", connections)
        for connection in connections:
            connection.close()

    async def _converse(self, plan: Plan, name: str, connections: list[Client]) -> None:
        messages: list[Any] = [user(plan.prompt)]
        for number in range(plan.turns):
            reply = await self._ask(plan, messages, f"{name}.{number}", connections)
            if reply is None:
                return
            if self.control is not None and self.attempt.kind == "turns" and self.network.draws(0.5):
                await self.score_turn(self.attempt.reads[-1] if self.network.draws(0.5) else reply[0])
            results = [{"role": "tool", "tool_call_id": each["id"], "content": "5"} for each in reply[1]["calls"]]
            messages += [echo(reply[1]), *(results or [user("Go on.")])]

    async def _ask(
        self, plan: Plan, messages: list[Any], request: str, connections: list[Client]
    ) -> tuple[Read, dict[str, Any]] | None:
        """Return the reply to a request, which may be sent several times; None if the client gives up."""
        body = json.dumps({"model": "policy", "messages": messages, "tools": [ADD], "stream": plan.stream}).encode()
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        if plan.keyed:
            headers["Idempotency-Key"] = request
        for number in range(6):
            if number and plan.marks:
                headers["x-stainless-retry-count"] = str(number)
            if self.network.draws(0.1):  # refused before the session sees it
                continue
            response = await self._send(plan, headers, body, connections)
            if response is not None:
                if response.status >= 500:
                    self.attempt.violations.append(f"server error: a request ended with {response.status}")
                if response.status != 200:
                    raise SessionOverError(response.body.decode())
                reply = response.reply()
                self.attempt.reads.append(read := Read(reply["id"], request, mark_of(reply["content"])))
                return read, reply
            self.attempt.is_altered = True
            if self.network.draws(0.2):
                return None
            await asyncio.sleep(self.network.delay(1.0))
        return None

    async def _send(
        self, plan: Plan, headers: dict[str, str], body: bytes, connections: list[Client]
    ) -> Response | None:
        """Send a request once; None if the client left, or the connection broke."""
        is_used = plan.keeps == "one" and connections and connections[-1].is_open
        connection = connections.pop() if is_used else self.network.connect(self.url)
        patience = self.network.delay(3.0 if self.network.draws(0.5) else 0.2) if self.network.draws(0.15) else None
        try:
            async with asyncio.timeout(patience):
                response = await connection.ask(f"{self.url}/chat/completions", "POST", headers, body)
        except (TimeoutError, ConnectionError):
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise
        if plan.keeps == "none" or self.network.draws(0.1):
            connection.close()
        else:
            connections.append(connection)
        return response

    async def score_turn(self, read: Read) -> None:
        """Report the score of a turn by its id or by its number, perhaps twice."""
        target: Any = read.id
        if self.network.draws(0.5):
            shown = await self._shown()
            target = next((each["turn"] for each in shown if read.id.endswith(each["id"])), None)
            if target is None:  # the session does not know yet that it was delivered
                return
        await self._report(read.mark, turn=target)

    async def score_record(self, read: Read) -> None:
        """Report the score of the record of a turn."""
        for number, turns in (await self._records()).items():
            if any(read.id.endswith(each["id"]) for each in turns):
                await self._report(read.mark, record=int(number))
                return

    async def score_session(self) -> None:
        await self._report("", value=0.5)

    async def _report(self, mark: str, value: float | None = None, **target: Any) -> None:
        assert self.control is not None
        value = value_of(mark) if value is None else value
        for copy in range(2 if self.network.draws(0.3) else 1):
            is_same = copy == 0 or self.network.draws(0.5)
            self._num_reports += 1
            name = f"report {self._num_reports - copy if is_same else self._num_reports}"
            body = {"id": name, "score": value if is_same else value + 1, **target}
            was_scored = mark in self.attempt.scores
            self.attempt.in_doubt.append((mark, body["score"]))
            response = await self.control.send(f"/sessions/{self.attempt.session}/score", body)
            self.attempt.in_doubt.remove((mark, body["score"]))
            if response.status == 200 and not was_scored:
                self.attempt.scores[mark] = body["score"]
            elif response.status == 200 and body["score"] != self.attempt.scores[mark]:
                self.attempt.violations.append("scores: a second score of one thing was accepted")

    async def _records(self) -> dict[str, Any]:
        assert self.control is not None
        response = await self.control.send(f"/sessions/{self.attempt.session}")
        return response.json()["records"] if response.status == 200 else {}

    async def _shown(self) -> list[dict[str, Any]]:
        return [each for turns in (await self._records()).values() for each in turns]


def echo(reply: dict[str, Any]) -> dict[str, Any]:
    """Return a reply as a client sends it back, with small changes that follow from its text."""
    kind = crc32(reply["content"].encode()) % 4
    content = reply["content"].strip() if kind == 1 else reply["content"]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reply["calls"]:
        message["tool_calls"] = [_echo_call(call, kind) for call in reply["calls"]]
    return message


def _echo_call(call: dict[str, Any], kind: int) -> dict[str, Any]:
    arguments = json.loads(call["function"]["arguments"])
    text = call["function"]["arguments"]
    if kind == 2:
        text = json.dumps(dict(reversed(arguments.items())), indent=1)
    elif kind == 3:
        text = json.dumps(arguments, separators=(",", ":"))
    return {"id": call["id"], "type": "function", "function": {"name": call["function"]["name"], "arguments": text}}
