"""
The file of a session's requests: JSON lines, in the order in which things happened.

The first line has the format, the task and the capabilities of the engine. Each other line is an `event`, of the
`call` with a number from 0:

- `call`: a request came, with `path`, `headers` without keys, and `body` as it was sent: a text, `base64` of bytes that
  are no text, or null if the gateway has not read all of it. A list has texts and numbers of `data` between them.
- `data`: a long text in base64, such as a picture, with its `number`; the bodies behind it refer to it.
- `answer`: a turn was sampled for it, or given to it again: `turn` is the id of the turn, `record` and `number` its
  place. The first answer with a turn has its `result`, size and digest of its `context`, and `sampled_for`: the call
  that the engine was asked for, which may be an earlier one.
- `refused`: the request has no answer; `kind`, `message` and `param` as in `turnwise_gateway.calls.CallRefusedError`.
- `kept`: the last client of the call leaves, and its turn is sampled for a retry behind a `context`.
- `left`: the client left before there was an answer.
- `delivered`, `released`: the client has the answer, or left before it had the last byte.
- `lost`: after `delivered`, the connection broke before the client had read the answer.
- `read`: a score has named the turn of the call, so its client has the answer.
- `forwarded`: another server has answered a request, which has no number: `path`, `model`, `body`, `status` and
  `response`. A replay leaves it out.
- `end`: the session is over; `records` has the columns and the lineage of each.

Values of open columns are written by `turnwise.record.open_columns.encode`. Numbers that JSON has not are written as
Python does, such as `-Infinity`.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import asdict, define, evolve, field, frozen

from turnwise import Episode, FinishReason, GenerateResult, Task, Trajectory
from turnwise.errors import DataError, describe
from turnwise.record.open_columns import decode, encode, to_plain
from turnwise.record.pictures import Pictures, before, places
from turnwise.types import Capabilities, TokenArray
from turnwise_gateway.calls import CallRefusedError, ForwardedCall, ModelCall
from turnwise_gateway.dialects import find_dialect
from turnwise_gateway.private_files import append_private_line
from turnwise_gateway.session.contexts import digest
from turnwise_gateway.session.delivery import Outcome
from turnwise_gateway.session.door import SessionListener
from turnwise_gateway.session.records import SampledTurn
from turnwise_gateway.session.session import Session

FORMAT: Final = "turnwise requests of a session"
VERSION: Final = 3
_READABLE: Final = (2, VERSION)
"""Version 2 has no `data`."""
_CAPABILITIES: Final = (
    *("logprobs", "seeds", "stop_strings", "abort", "grammars", "pictures", "max_context", "vocab_size"),
)
_LONG_DATA: Final = re.compile("([A-Za-z0-9+/]{1024,}={0,2})")
_WIRE_HEADERS: Final = frozenset({"accept-encoding", "connection", "content-length", "host", "transfer-encoding"})
"""Headers of a connection and not of the request."""

Event = dict[str, Any]


def digest_context(token_ids: TokenArray, pictures: Pictures = ()) -> str:
    """Return a digest of a context."""
    return digest(token_ids, pictures, 16)


def describe_episode_records(episode: Episode, first: int = 0) -> list[Event]:
    """Return columns and lineage of each record from a number on, as JSON values; parents count from there."""
    lineage = [
        asdict(line if line.parent is None else evolve(line, parent=line.parent - first)) for line in episode.lineage
    ]
    return [
        {**_plain(to_plain(record.to_dict())), "lineage": lineage[number] if lineage else None}
        for number, record in enumerate(episode.trajectories)
        if number >= first
    ]


def _plain(values: Mapping[str, Any]) -> Event:
    # Through JSON and back, so that values compare with those of a file.
    lists = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}
    if "pictures" in lists:
        lists["pictures"] = places(lists["pictures"])
    plain: Event = json.loads(json.dumps(lists))
    return plain


@define(eq=False)
class RequestLog(SessionListener):
    """
    Writes what happens in a session to a file.

    Attributes:
        session: to listen to.
        path: of the file, which is made.
    """

    session: Session
    path: Path
    _turns: dict[str, int] = field(factory=dict, init=False)
    _data: dict[bytes, int] = field(factory=dict, init=False)  # by their digests

    def __attrs_post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        episode = self.session.episode
        names = ("rollout_n", "global_step", "validation")
        self._write(
            {
                **{"format": FORMAT, "version": VERSION, "session": self.session.name, "task": asdict(episode.task)},
                **{name: getattr(episode, name) for name in names},
                "capabilities": {name: getattr(episode.capabilities, name) for name in _CAPABILITIES},
            }
        )

    def on_call(self, number: int, call: ModelCall) -> None:
        headers = {name: value for name, value in call.headers.items() if name not in _WIRE_HEADERS}
        path = f"/{find_dialect(call.dialect).path}"
        body = self._divide(_write_body(call.body))
        self._write({"event": "call", "call": number, "path": path, "headers": headers, **body})

    def on_answer(self, number: int, turn: SampledTurn) -> None:
        self._write({"event": "answer", "call": number, **self._describe(number, turn)})

    def on_refused(self, number: int, refusal: CallRefusedError) -> None:
        described = {"kind": refusal.kind, "message": refusal.message, "param": refusal.param}
        self._write({"event": "refused", "call": number, **described})

    def on_left(self, number: int) -> None:
        self._write({"event": "left", "call": number})

    def on_kept(self, number: int, record: Trajectory) -> None:
        context = [len(record), digest_context(record.input_ids, record.pictures)]
        self._write({"event": "kept", "call": number, "context": context})

    def on_outcome(self, number: int, outcome: Outcome) -> None:
        self._write({"event": outcome, "call": number})

    def on_forwarded(self, call: ForwardedCall) -> None:
        texts = {name: getattr(call, name).decode("utf-8", "replace") for name in ("body", "response")}
        self._write({"event": "forwarded", "path": call.path, "model": call.model, "status": call.status, **texts})

    def on_read(self, turn_id: str) -> None:
        if turn_id in self._turns:
            self._write({"event": "read", "call": self._turns[turn_id]})

    def on_close(self, *, is_trained: bool) -> None:
        if not is_trained:
            return  # a replay trains them, and so gives other records
        # Lost attempts at the episode have left earlier records.
        first = len(self.session.episode.trajectories) - len(self.session.book.records)
        self._write({"event": "end", "records": describe_episode_records(self.session.episode, first)})

    def _describe(self, number: int, turn: SampledTurn) -> Event:
        reply = turn.reply
        described = {"turn": reply.id, "record": reply.provenance["record"], "number": reply.provenance["turn"]}
        if reply.id in self._turns:
            return described
        self._turns[reply.id] = number
        size, record = reply.usage.prompt_tokens, turn.record.trajectory
        context = [size, digest_context(record.input_ids[:size], before(record.pictures, size))]
        described |= {"context": context, "sampled_for": turn.number}
        columns = {name: encode(values) for name, values in (turn.result.columns or {}).items()}
        result = _plain(asdict(evolve(turn.result, columns=None)))
        return {**described, "result": {**result, "columns": columns or None}}

    def _divide(self, body: Event) -> Event:
        """Return a body with the numbers of its long texts in base64, whose events are written before."""
        pieces: list[str | int] = _LONG_DATA.split(body.get("body") or "")
        if len(pieces) == 1:
            return body
        for place in range(1, len(pieces), 2):  # the texts in base64
            text = str(pieces[place])
            name = sha256(text.encode()).digest()
            if name not in self._data:
                self._data[name] = len(self._data)
                self._write({"event": "data", "number": self._data[name], "text": text})
            pieces[place] = self._data[name]
        return {"body": pieces}

    def _write(self, event: Event) -> None:
        append_private_line(self.path, event)


def _write_body(body: bytes | None) -> Event:
    try:
        return {"body": None if body is None else body.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(body or b"").decode("ascii")}


def read_body(event: Event, data: Mapping[int, str]) -> bytes | None:
    """Return the body of a request, with the texts that it refers to; None if the gateway had not read all of it."""
    if "base64" in event:
        return base64.b64decode(event["base64"])
    body = event["body"]
    if isinstance(body, list):
        return "".join(each if isinstance(each, str) else data[each] for each in body).encode()
    return None if body is None else str(body).encode()


def log_session(session: Session, folder: str | Path | None) -> None:
    """Keep the requests of a session in a file of a folder, if there is a folder."""
    if folder is not None:
        session.door.listeners.append(RequestLog(session, Path(folder) / f"{session.name}.jsonl"))


@frozen(kw_only=True)
class RequestFile:
    """
    A file of requests.

    Attributes:
        path: of the file.
        session: name of the session.
        task: of the session.
        rollout_n: number of the episode.
        global_step: of the episode.
        validation: of the episode.
        capabilities: of the engine, as far as the answers of a session depend on them.
        events: in order, without the end.
        data: the long texts of its bodies, by their numbers.
        records: of the session; None when the file has no end.
    """

    path: Path
    session: str
    task: Task
    rollout_n: int
    global_step: int
    validation: bool
    capabilities: Capabilities
    events: tuple[Event, ...]
    data: Mapping[int, str]
    records: list[Event] | None


def read_requests(path: Path) -> RequestFile:
    """Read a file of requests; `DataError` when it is none. A last line that was cut off by a kill is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        head = json.loads(lines[0]) if lines else None
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise DataError(f"{path}: not a file with the requests of a session")
        if head["version"] not in _READABLE:
            raise DataError(f"{path}: has version {head['version']}, but this version reads {VERSION}")
        events = [json.loads(line) for line in lines[1:-1]]
        events += _read_last(lines[-1]) if len(lines) > 1 else []
        data = {event["number"]: event["text"] for event in events if event["event"] == "data"}
        events = [event for event in events if event["event"] not in ("forwarded", "data")]
        ends = [number for number, event in enumerate(events) if event["event"] == "end"]
        task = head["task"]
        return RequestFile(
            path=path,
            session=head["session"],
            task=Task(**{**task, "messages": tuple(task["messages"])}),
            rollout_n=head["rollout_n"],
            global_step=head["global_step"],
            validation=head["validation"],
            capabilities=Capabilities(**{"grammars": False} | head["capabilities"]),
            events=tuple(events[: ends[0]] if ends else events),
            data=data,
            records=events[ends[0]]["records"] if ends else None,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: cannot be read: {describe(error)}") from error


def _read_last(line: str) -> list[Event]:
    try:
        return [json.loads(line)]
    except ValueError:
        return []


def read_result(event: Event) -> GenerateResult:
    """Return the result of an event."""
    result = event["result"]
    versions, columns = result["weight_version"], result.get("columns")
    return GenerateResult(
        **{
            **result,
            "columns": {name: decode(values) for name, values in columns.items()} if columns else None,
            "finish_reason": FinishReason(result["finish_reason"]),
            "weight_version": versions if isinstance(versions, int) else np.array(versions, np.int32),
        }
    )
