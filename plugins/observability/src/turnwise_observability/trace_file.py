"""
The observer `trace_file`: a run as a trace that Perfetto and Chrome show, a row per replica and per worker.

The format is the JSON object form of the Trace Event Format. The file ends with its closing brackets after every
episode, so that it can be read while the run goes on, and whatever ends the run. Of each worker, slots show episodes
with their turns, tool calls and rewards; of each replica, slots show what the engine was asked, and an arrow leads
there from the turn that asked. What overlaps without one being part of the other stands in different slots.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from attrs import define, field, frozen

from turnwise.errors import ConfigError
from turnwise.observer import (
    ActorRestarted,
    EpisodesRetried,
    MemorySwitched,
    ToolFinished,
    TurnFinished,
    WeightsUpdated,
    unix_s,
)
from turnwise.timeline import EpisodeTimeline, TimelineObserver

_HEAD: Final = b'{"displayTimeUnit":"ms","otherData":{"producer":"turnwise"},"traceEvents":[\n'
_TAIL: Final = b"\n]}\n"
_WORKERS, _REPLICAS, _DRIVER = 1000, 100_000, 1
_MEMORY_SLOT: Final = 0


@frozen
class TraceFileConfig:
    """
    Options of `trace_file`.

    Attributes:
        path: file that is written, replaced when it is there; open it at https://ui.perfetto.dev.
    """

    path: str


@define
class _Lane:
    """Slices of one slot that do not overlap: starts and ends in microseconds, both ascending."""

    starts: list[float] = field(factory=list)
    ends: list[float] = field(factory=list)

    def take(self, start: float, end: float) -> bool:
        """Take the time from start to end when it is free."""
        at = bisect_left(self.ends, start)
        while at < len(self.ends) and self.ends[at] <= start:
            at += 1
        if at < len(self.starts) and self.starts[at] < end:
            return False
        self.starts.insert(at, start)
        self.ends.insert(at, end)
        return True


class TraceFile(TimelineObserver):
    """
    Writes a trace of everything that it hears between `open` and `close`.

    `open` raises `ConfigError` when the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self._path = Path(path)
        self._file: BinaryIO | None = None
        self._events: list[Mapping[str, Any]] = []
        self._is_empty = True
        self._base_s = 0.0
        self._lanes: dict[int, list[_Lane]] = {}
        self._num_flows = 0

    def open(self) -> None:
        """Begin the file, and the trace's time."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("wb")
        except OSError as error:
            raise ConfigError(f"trace file {self._path}: cannot be written: {error.strerror}") from error
        self._file.write(_HEAD + _TAIL)
        self._file.flush()
        self._is_empty, self._lanes, self._events = True, {}, []
        self._base_s = unix_s(time.perf_counter())

    def close(self) -> None:
        """Write what has not ended, and end the file."""
        super().close()
        if self._file is not None:
            self._write()
            self._file.close()
            self._file = None

    # What is heard

    def on_timeline(self, timeline: EpisodeTimeline) -> None:
        """Draw an episode, and write it."""
        start = timeline.start
        worker = self._row(_WORKERS, start.worker)
        began, ended = self._us(start.started_at), self._us(timeline.ended_at)
        lane = self._lane(worker, began, ended)
        arguments = {"uid": start.uid, "agent": start.agent_name, "step": start.global_step, **_outcome(timeline)}
        self._slice(worker, lane, "episode", (began, ended), arguments, name=f"episode {start.uid}")
        # What is drawn inside the episode's own slice must not overlap its neighbour; what would has a slot of its own.
        inside = _Lane()
        for number, (turn, tools) in enumerate(timeline.rounds()):
            self._turn(worker, lane, inside, number, turn, tools)
        if timeline.reward is not None:
            reward = timeline.reward
            span = self._span(reward.started_at, reward.seconds)
            where = lane if inside.take(*span) else self._lane(worker, *span)
            self._slice(worker, where, "reward", span, {"uid": reward.uid, "reward": reward.reward})
        self._write()

    def on_weights_updated(self, event: WeightsUpdated) -> None:
        """Draw a weight update on its replica."""
        arguments = {"version": event.version, "bytes": event.num_bytes}
        self._of_memory(event.replica, "weights", event.started_at, event.seconds, arguments)

    def on_memory_switched(self, event: MemorySwitched) -> None:
        """Draw a stage of switching memory on its replica."""
        arguments = {"bytes_before": event.bytes_before, "bytes_after": event.bytes_after}
        self._of_memory(event.replica, event.stage, event.started_at, event.seconds, arguments)

    def on_actor_restarted(self, event: ActorRestarted) -> None:
        """Mark a restart."""
        self._mark(f"{event.kind} {event.index} restarted", {"reason": event.reason, "restarts": event.restarts})

    def on_episodes_retried(self, event: EpisodesRetried) -> None:
        """Mark that episodes run again."""
        self._mark(f"{event.count} episodes run again", {"worker": event.worker, "reason": event.reason})

    # What is drawn

    def _turn(
        self, worker: int, lane: int, inside: _Lane, number: int, turn: TurnFinished, tools: list[ToolFinished]
    ) -> None:
        generate = self._span(turn.started_at, turn.seconds)
        spans = [self._span(tool.started_at, tool.seconds) for tool in tools]
        span = (generate[0], max([generate[1], *(end for _start, end in spans)]))
        own = lane if inside.take(*span) else self._lane(worker, *span)
        self._slice(worker, own, "turn", span, {"uid": turn.uid, "turn": number})
        within = _Lane()
        within.take(*generate)
        for tool, each in zip(tools, spans, strict=True):
            where = own if within.take(*each) else self._lane(worker, *each)
            arguments = {"uid": tool.uid, "error": tool.error, "characters": tool.num_characters}
            self._slice(worker, where, "tool", each, arguments, name=f"tool {tool.tool}"[:80])
        self._generate(turn, generate, (worker, own))

    def _generate(self, turn: TurnFinished, span: tuple[float, float], asked_by: tuple[int, int]) -> None:
        replica = self._row(_REPLICAS, f"replica {turn.replica}")
        slot = self._lane(replica, *span)
        arguments = {
            "uid": turn.uid,
            "worker": turn.worker,
            "context_tokens": turn.num_context_tokens,
            "cached_tokens": turn.num_cached_tokens,
            "new_tokens": turn.num_new_tokens,
            "finish_reason": str(turn.finish_reason),
        }
        self._slice(replica, slot, "generate", span, arguments)
        self._num_flows += 1
        flow = {"name": "asks", "cat": "flow", "id": self._num_flows, "ts": span[0]}
        self._events.append({**flow, "ph": "s", "pid": asked_by[0], "tid": asked_by[1]})
        self._events.append({**flow, "ph": "f", "bp": "e", "pid": replica, "tid": slot})

    def _of_memory(
        self, replica: int, name: str, started_at: float, seconds: float, arguments: Mapping[str, Any]
    ) -> None:
        row = _DRIVER if replica < 0 else self._row(_REPLICAS, f"replica {replica}")
        self._slice(row, _MEMORY_SLOT, "memory", self._span(started_at, seconds), arguments, name=name)
        self._write()

    def _mark(self, name: str, arguments: Mapping[str, Any]) -> None:
        now = self._us(unix_s(time.perf_counter()))
        self._events.append(
            {"ph": "i", "s": "g", "name": name, "cat": "fault", "ts": now, "pid": _DRIVER, "tid": 0, "args": arguments}
        )
        self._write()

    def _slice(
        self,
        row: int,
        slot: int,
        category: str,
        span: tuple[float, float],
        arguments: Mapping[str, Any],
        *,
        name: str = "",
    ) -> None:
        event = {
            "ph": "X",
            "name": name or category,
            "cat": category,
            "ts": span[0],
            "dur": round(span[1] - span[0], 3),
        }
        self._events.append({**event, "pid": row, "tid": slot, "args": arguments})

    # Rows and slots

    def _row(self, first: int, name: str) -> int:
        """Return the number of a worker's or replica's row; the first time, name it."""
        number = name.rpartition(" ")[2]
        row = first + (int(number) if number.isdecimal() else 0)
        if row not in self._lanes:
            self._lanes[row] = []
            self._describe(row, "process_name", {"name": name})
            self._describe(row, "process_sort_index", {"sort_index": row})
        return row

    def _lane(self, row: int, start: float, end: float) -> int:
        """Return a slot of the row that is free from start to end, from 1; a new one when none is."""
        lanes = self._lanes[row]
        for index, lane in enumerate(lanes):
            if lane.take(start, end):
                return index + 1
        lanes.append(_Lane([start], [end]))
        self._describe(row, "thread_name", {"name": f"slot {len(lanes)}"}, len(lanes))
        return len(lanes)

    def _describe(self, row: int, what: str, arguments: Mapping[str, Any], slot: int = 0) -> None:
        self._events.append({"ph": "M", "name": what, "pid": row, "tid": slot, "args": arguments})

    def _us(self, at_s: float) -> float:
        return round(1e6 * (at_s - self._base_s), 3)

    def _span(self, started_at: float, seconds: float) -> tuple[float, float]:
        return self._us(started_at), self._us(started_at + seconds)

    def _write(self) -> None:
        """Put the events before the end of the file, in one write, so that it is whole before and after."""
        if self._file is None or not self._events:
            return
        text = ",\n".join(json.dumps(event, allow_nan=False, separators=(",", ":")) for event in self._events)
        self._file.seek(-len(_TAIL), 2)
        self._file.write((b"" if self._is_empty else b",\n") + text.encode() + _TAIL)
        self._file.flush()
        self._is_empty, self._events = False, []


def _outcome(timeline: EpisodeTimeline) -> dict[str, Any]:
    result = timeline.result
    if result is None:
        return {"status": "unfinished"}
    metrics = result.metrics
    fault = f"{result.fault.owner}: {result.fault.kind}: {result.fault.message}" if result.fault else None
    return {
        "status": str(result.status),
        "fault": fault,
        "reward": result.reward,
        "turns": metrics.num_turns,
        "tokens": dict(metrics.num_tokens),
        "llm_s": round(metrics.llm_s, 6),
        "tool_s": round(metrics.tool_s, 6),
    }
