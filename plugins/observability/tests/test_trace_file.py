"""Slots of the trace file, interrupted runs and bad paths; `tests/test_observed_runs.py` tests whole runs."""

import json
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import ConfigError
from turnwise.events.observer import (
    ActorRestarted,
    EpisodesRetried,
    EpisodeStarted,
    MemorySwitched,
    RewardFinished,
    ToolFinished,
    TurnFinished,
    WeightsUpdated,
    unix_s,
)
from turnwise.record.result import EpisodeResult
from turnwise.types import EpisodeMetrics, Fault, FinishReason, Status, Task
from turnwise_observability.config import TraceFileConfig
from turnwise_observability.trace_file import TraceFile

seconds = st.floats(0, 3, width=32)


def task(uid):
    return Task(messages=({"role": "user", "content": "x"},), uid=uid)


def start(trace, uid, at=0.0, worker="worker 0"):
    event = EpisodeStarted(uid=f"{uid}/0", task=task(uid), agent_name="a", key=uid, worker=worker, started_at=at)
    trace.on_episode_started(event)


def turn(trace, uid, at, lasts, replica=0):
    trace.on_turn_finished(
        TurnFinished(
            uid=f"{uid}/0",
            num_context_tokens=5,
            num_new_tokens=3,
            num_cached_tokens=1,
            finish_reason=FinishReason.STOP,
            seconds=lasts,
            key=uid,
            worker="worker 0",
            replica=replica,
            started_at=at,
        )
    )


def tool(trace, uid, at, lasts):
    event = ToolFinished(
        uid=f"{uid}/0",
        tool="t",
        seconds=lasts,
        error=False,
        num_characters=2,
        key=uid,
        worker="worker 0",
        started_at=at,
    )
    trace.on_tool_finished(event)


def end(trace, uid, total_s, **fields):
    fields.setdefault("status", Status.COMPLETED)
    trace.on_episode_finished(EpisodeResult(task=task(uid), metrics=EpisodeMetrics(total_s=total_s), **fields))


def written(path):
    return json.loads(path.read_text())["traceEvents"]


def assert_nested(events):
    """In each slot, a slice ends before the next starts, or contains it."""
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    for lane in lanes.values():
        ends = []
        for start, minus in sorted(lane):
            while ends and ends[-1] <= start + 0.0015:
                ends.pop()
            assert not ends or start - minus <= ends[-1] + 0.0015
            ends.append(start - minus)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            seconds,
            st.lists(st.tuples(seconds, seconds, st.integers(0, 2)), max_size=5),
            st.lists(st.tuples(seconds, seconds), max_size=5),
        ),
        max_size=8,
    )
)
def test_slices_nest_whatever_happens(tmp_path_factory, episodes):
    """
    Episodes, turns and tool calls at any times, in parallel and in any order, give a file with one slice for each of
    them, in which the slices of each slot nest.
    """
    path = tmp_path_factory.mktemp("trace") / "run.json"
    trace = TraceFile(path)
    trace.open()
    base = unix_s(0.0)
    for number, (started_at, turns, tools) in enumerate(episodes):
        uid = f"e{number}"
        start(trace, uid, base + started_at)
        for at, lasts, replica in turns:
            turn(trace, uid, base + started_at + at, lasts, replica)
        for at, lasts in tools:
            tool(trace, uid, base + started_at + at, lasts)
        end(trace, uid, 1.0)
    trace.close()
    events = written(path)

    assert_nested(events)
    counts = defaultdict(int)
    for event in events:
        counts[event.get("cat")] += event["ph"] == "X"
    assert counts["episode"] == len(episodes)
    assert counts["generate"] == counts["turn"] == sum(len(turns) for _start, turns, _tools in episodes)
    assert counts["tool"] == sum(len(tools) for _start, turns, tools in episodes if turns)


def test_the_file_is_valid_after_every_episode(tmp_path):
    """The file is valid JSON before `close`, and has all episodes that have ended."""
    path = tmp_path / "run.json"
    trace = TraceFile(path)
    trace.open()
    assert written(path) == []
    for uid in ("a", "b"):
        start(trace, uid, unix_s(0.0))
        turn(trace, uid, unix_s(0.0), 0.5)
        end(trace, uid, 1.0)
        names = [event["args"]["uid"] for event in written(path) if event.get("cat") == "episode"]
        assert names[-1] == f"{uid}/0"
    trace.close()
    trace.close()


def test_unfinished_episodes_are_drawn_at_the_end(tmp_path):
    """Episodes of a stopped run, and attempts whose worker died, are drawn as unfinished."""
    trace = TraceFile(tmp_path / "run.json")
    trace.open()
    base = unix_s(0.0)
    start(trace, "a", base)
    turn(trace, "a", base, 0.5)
    first = EpisodeStarted(uid="b/0", task=task("b"), agent_name="a", key="b1", worker="worker 1", started_at=base)
    trace.on_episode_started(first)
    start(trace, "b", base + 1)
    end(trace, "b", 1.0, status=Status.FAILED, fault=Fault(owner="infra", kind="K", message="gone"))
    end(trace, "never-began", 0.0, status=Status.ABORTED)
    trace.close()

    episodes = [event["args"] for event in written(tmp_path / "run.json") if event.get("cat") == "episode"]
    assert [(e["uid"], e["status"], e.get("fault")) for e in episodes] == [
        ("b/0", "unfinished", None),
        ("b/0", "failed", "infra: K: gone"),
        ("a/0", "unfinished", None),
    ]


def test_rows_of_memory_weights_and_faults(tmp_path):
    """Weight updates and memory stages are slices of a replica, or of the driver for a trainer; faults are marks."""
    trace = TraceFile(tmp_path / "run.json")
    trace.open()
    now = unix_s(0.0)
    trace.on_weights_updated(WeightsUpdated(version=4, seconds=0.25, num_bytes=10, replica=1, started_at=now))
    trace.on_memory_switched(MemorySwitched(stage="sleep", seconds=1.0, bytes_before=9, replica=1, started_at=now + 1))
    trace.on_memory_switched(MemorySwitched(stage="offload", seconds=1.0, replica=-1, started_at=now))
    trace.on_actor_restarted(ActorRestarted(kind="worker", index=2, reason="died", restarts=1))
    trace.on_episodes_retried(EpisodesRetried(count=3, worker="worker 2", reason="died"))
    start(trace, "a", now)
    trace.on_reward_finished(RewardFinished(uid="a/0", reward=0.5, seconds=0.1, key="a", started_at=now + 1))
    end(trace, "a", 0.5)
    trace.close()
    events = written(tmp_path / "run.json")

    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    drawn = [(names.get(e["pid"], "driver"), e["name"], e["dur"]) for e in events if e.get("cat") == "memory"]
    assert drawn == [("replica 1", "weights", 250000.0), ("replica 1", "sleep", 1e6), ("driver", "offload", 1e6)]
    assert [e["name"] for e in events if e["ph"] == "i"] == ["worker 2 restarted", "3 episodes restarted"]
    assert_nested(events)


def test_a_path_that_cannot_be_written(tmp_path):
    """`open` raises an error, so no episode runs before it."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="observer trace_file: cannot write"):
        TraceFile(tmp_path / "file" / "run.json").open()


def test_config():
    """The config has a path."""
    assert TraceFileConfig(path="x").path == "x"
