"""
The observer `trace_file`: writes a run as a trace for Perfetto and Chrome, with a row per worker and per replica.

The format is the JSON object form of the Trace Event Format. The file has its closing brackets after each episode, so
it is valid JSON during the run and after a crash. The slots of a worker show episodes with their turns, tool calls and
rewards; the slots of a replica show generate calls. An arrow connects each turn with its generate call. Slices that
overlap without nesting are drawn in different slots.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from attrs import define, field

from turnwise import Resources
from turnwise.errors import ConfigError
from turnwise.events.observer import (
    ActorRestarted,
    EpisodeEvent,
    EpisodesRetried,
    MemorySwitched,
    ToolFinished,
    TurnFinished,
    WeightsUpdated,
    unix_s,
)
from turnwise_observability.config import TraceFileConfig
from turnwise_observability.timeline import EpisodeTimeline, TimelineObserver

_HEAD: Final = b'{"displayTimeUnit":"ms","otherData":{"producer":"turnwise"},"traceEvents":[\n'
_TAIL: Final = b"\n]}\n"
_WORKERS, _REPLICAS, _DRIVER = 1000, 100_000, 1
_MEMORY_SLOT: Final = 0


def make_trace_file(config: TraceFileConfig, _resources: Resources) -> TraceFile:
    """Return the observer."""
    return TraceFile(config.path)


@define
class _Lane:
    """The slices of one slot, which do not overlap: starts and ends in microseconds, both ascending."""

    starts: list[float] = field(factory=list)
    ends: list[float] = field(factory=list)

    def reserve(self, start: float, end: float) -> bool:
        """Reserve the time from start to end; return False if a slice overlaps it."""
        at = bisect_left(self.ends, start)
        # Slices that end at `start` do not overlap; several can, if they have no length.
        while at < len(self.ends) and self.ends[at] <= start:
            at += 1
        if at < len(self.starts) and self.starts[at] < end:
            return False
        self.starts.insert(at, start)
        self.ends.insert(at, end)
        return True


class TraceFile(TimelineObserver):
    """Writes all events between `open` and `close`; `open` raises `ConfigError` if it cannot write the file."""

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
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("wb")
        except OSError as error:
            raise ConfigError(f"observer trace_file: cannot write {self._path}: {error.strerror}") from error
        self._file.write(_HEAD + _TAIL)
        self._file.flush()
        self._is_empty, self._lanes, self._events = True, {}, []
        self._base_s = unix_s(time.perf_counter())

    def close(self) -> None:
        super().close()
        if self._file is not None:
            self._write()
            self._file.close()
            self._file = None

    # Events

    def end_timeline(self, timeline: EpisodeTimeline) -> None:
        start = timeline.start
        worker = self._row(_WORKERS, start.worker)
        span = self._us(start.started_at), self._us(timeline.ended_at)
        lane = self._lane(worker, *span)
        arguments = {
            **_names(start),
            "sample_index": start.task.sample_index,
            "rollout_n": start.rollout_n,
            "agent": start.agent_name,
            "step": start.global_step,
            **_outcome(timeline),
        }
        self._slice(worker, lane, "episode", span, arguments, name=f"episode {start.uid}")
        # Slices inside the episode's slice must not overlap each other; one that would gets another slot.
        inside = _Lane()
        for number, (turn, tools) in enumerate(timeline.turns_with_tools()):
            self._turn(worker, lane, inside, number, turn, tools)
        if timeline.reward is not None:
            reward = timeline.reward
            scored = self._span(reward.started_at, reward.seconds)
            slot = lane if inside.reserve(*scored) else self._lane(worker, *scored)
            self._slice(worker, slot, "reward", scored, {**_names(reward), "reward": reward.reward})
        self._write()

    def on_weights_updated(self, event: WeightsUpdated) -> None:
        arguments = {"version": event.version, "bytes": event.num_bytes}
        self._memory_slice(event.replica, "weights", event.started_at, event.seconds, arguments)

    def on_memory_switched(self, event: MemorySwitched) -> None:
        arguments = {"bytes_before": event.bytes_before, "bytes_after": event.bytes_after}
        self._memory_slice(event.replica, event.stage, event.started_at, event.seconds, arguments)

    def on_actor_restarted(self, event: ActorRestarted) -> None:
        self._mark(f"{event.kind} {event.index} restarted", {"reason": event.reason, "restarts": event.restarts})

    def on_episodes_retried(self, event: EpisodesRetried) -> None:
        self._mark(f"{event.count} episodes restarted", {"worker": event.worker, "reason": event.reason})

    # Slices

    def _turn(
        self, worker: int, lane: int, inside: _Lane, number: int, turn: TurnFinished, tools: list[ToolFinished]
    ) -> None:
        generate = self._span(turn.started_at, turn.seconds)
        spans = [self._span(tool.started_at, tool.seconds) for tool in tools]
        span = (generate[0], max([generate[1], *(end for _start, end in spans)]))
        own = lane if inside.reserve(*span) else self._lane(worker, *span)
        self._slice(worker, own, "turn", span, {**_names(turn), "turn": number})
        within = _Lane()
        within.reserve(*generate)
        for tool, each in zip(tools, spans, strict=True):
            slot = own if within.reserve(*each) else self._lane(worker, *each)
            arguments = {**_names(tool), "error": tool.error, "characters": tool.num_characters}
            self._slice(worker, slot, "tool", each, arguments, name=f"tool {tool.tool}"[:80])
        self._generate(turn, generate, (worker, own))

    def _generate(self, turn: TurnFinished, span: tuple[float, float], caller: tuple[int, int]) -> None:
        replica = self._row(_REPLICAS, f"replica {turn.replica}")
        slot = self._lane(replica, *span)
        arguments = {
            **_names(turn),
            "replica": turn.replica,
            "context_tokens": turn.num_context_tokens,
            "cached_tokens": turn.num_cached_tokens,
            "new_tokens": turn.num_new_tokens,
            "finish_reason": str(turn.finish_reason),
        }
        self._slice(replica, slot, "generate", span, arguments)
        self._num_flows += 1
        flow = {"name": "asks", "cat": "flow", "id": self._num_flows, "ts": span[0]}
        self._events.append({**flow, "ph": "s", "pid": caller[0], "tid": caller[1]})
        self._events.append({**flow, "ph": "f", "bp": "e", "pid": replica, "tid": slot})

    def _memory_slice(
        self, replica: int, name: str, started_at: float, seconds: float, arguments: Mapping[str, object]
    ) -> None:
        row = _DRIVER if replica < 0 else self._row(_REPLICAS, f"replica {replica}")
        self._slice(row, _MEMORY_SLOT, "memory", self._span(started_at, seconds), arguments, name=name)
        self._write()

    def _mark(self, name: str, arguments: Mapping[str, object]) -> None:
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
        arguments: Mapping[str, object],
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
        """Return the row number of a worker or replica; name the row on its first use."""
        number = name.rpartition(" ")[2]
        row = first + (int(number) if number.isdecimal() else 0)
        if row not in self._lanes:
            self._lanes[row] = []
            self._describe(row, "process_name", {"name": name})
            self._describe(row, "process_sort_index", {"sort_index": row})
        return row

    def _lane(self, row: int, start: float, end: float) -> int:
        """Reserve time in the first free slot of a row, or in a new one; return its number, from 1."""
        lanes = self._lanes[row]
        for index, lane in enumerate(lanes):
            if lane.reserve(start, end):
                return index + 1
        lanes.append(_Lane([start], [end]))
        self._describe(row, "thread_name", {"name": f"slot {len(lanes)}"}, len(lanes))
        return len(lanes)

    def _describe(self, row: int, key: str, arguments: Mapping[str, object], slot: int = 0) -> None:
        self._events.append({"ph": "M", "name": key, "pid": row, "tid": slot, "args": arguments})

    def _us(self, at_s: float) -> float:
        return round(1e6 * (at_s - self._base_s), 3)

    def _span(self, started_at: float, seconds: float) -> tuple[float, float]:
        return self._us(started_at), self._us(started_at + seconds)

    def _write(self) -> None:
        """Insert the events before the closing brackets."""
        if self._file is None or not self._events:
            return
        text = ",\n".join(json.dumps(event, allow_nan=False, separators=(",", ":")) for event in self._events)
        self._file.seek(-len(_TAIL), 2)
        # In one write, so that a crash leaves the file valid, either with these events or without.
        self._file.write((b"" if self._is_empty else b",\n") + text.encode() + _TAIL)
        self._file.flush()
        self._is_empty, self._events = False, []


def _names(event: EpisodeEvent) -> dict[str, str]:
    """Return the names of an attempt; `key` is in the files of episodes as well, and no other attempt has it."""
    return {"uid": event.uid, "key": event.key, "worker": event.worker}


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
        "replicas": list(metrics.replicas),
    }
