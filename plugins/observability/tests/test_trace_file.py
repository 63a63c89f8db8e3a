"""The trace file: lanes, what cuts a run short, and bad paths; whole runs are in `tests/test_observed_runs.py`."""

import json
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import ConfigError
from turnwise.observer import (
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
from turnwise.result import EpisodeResult
from turnwise.trace_file import TraceFile, TraceFileConfig
from turnwise.types import EpisodeMetrics, Fault, FinishReason, Status, Task

seconds = st.floats(0, 3, width=32)


def task(uid):
    return Task(messages=({"role": "user", "content": "x"},), uid=uid)


def begin(trace, uid, at=0.0, worker="worker 0"):
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
    """In each lane, a slice ends before the next begins, or holds it whole."""
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
    Episodes, turns and tool calls at any times, also in parallel and in any order, make a file whose lanes nest, with
    one slice for each of them.
    """
    path = tmp_path_factory.mktemp("trace") / "run.json"
    trace = TraceFile(path)
    trace.open()
    base = unix_s(0.0)
    for number, (start, turns, tools) in enumerate(episodes):
        uid = f"e{number}"
        begin(trace, uid, base + start)
        for at, lasts, replica in turns:
            turn(trace, uid, base + start + at, lasts, replica)
        for at, lasts in tools:
            tool(trace, uid, base + start + at, lasts)
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


def test_the_file_is_whole_after_every_episode(tmp_path):
    """
    Nothing has to be closed for the file to be valid: what was heard of ended episodes is in it.
    """
    path = tmp_path / "run.json"
    trace = TraceFile(path)
    trace.open()
    assert written(path) == []
    for uid in ("a", "b"):
        begin(trace, uid, unix_s(0.0))
        turn(trace, uid, unix_s(0.0), 0.5)
        end(trace, uid, 1.0)
        names = [event["args"]["uid"] for event in written(path) if event.get("cat") == "episode"]
        assert names[-1] == f"{uid}/0"
    trace.close()
    trace.close()


def test_what_never_ended_is_drawn_at_the_end(tmp_path):
    """
    Episodes of a run that was cut, and attempts whose worker died, are there as unfinished.
    """
    trace = TraceFile(tmp_path / "run.json")
    trace.open()
    base = unix_s(0.0)
    begin(trace, "a", base)
    turn(trace, "a", base, 0.5)
    first = EpisodeStarted(uid="b/0", task=task("b"), agent_name="a", key="b1", worker="worker 1", started_at=base)
    trace.on_episode_started(first)
    begin(trace, "b", base + 1)
    end(trace, "b", 1.0, status=Status.FAILED, fault=Fault(owner="infra", kind="K", message="gone"))
    end(trace, "never-began", 0.0, status=Status.ABORTED)
    trace.close()

    episodes = [event["args"] for event in written(tmp_path / "run.json") if event.get("cat") == "episode"]
    assert [(e["uid"], e["status"], e.get("fault")) for e in episodes] == [
        ("b/0", "unfinished", None),
        ("b/0", "failed", "infra: K: gone"),
        ("a/0", "unfinished", None),
    ]


def test_memory_weights_and_faults_have_their_places(tmp_path):
    """
    Weight updates and memory stages are slices on their replica, the trainer's on the driver's; faults are marks.
    """
    trace = TraceFile(tmp_path / "run.json")
    trace.open()
    now = unix_s(0.0)
    trace.on_weights_updated(WeightsUpdated(version=4, seconds=0.25, num_bytes=10, replica=1, started_at=now))
    trace.on_memory_switched(MemorySwitched(stage="sleep", seconds=1.0, bytes_before=9, replica=1, started_at=now + 1))
    trace.on_memory_switched(MemorySwitched(stage="offload", seconds=1.0, replica=-1, started_at=now))
    trace.on_actor_restarted(ActorRestarted(kind="worker", index=2, reason="died", restarts=1))
    trace.on_episodes_retried(EpisodesRetried(count=3, worker="worker 2", reason="died"))
    begin(trace, "a", now)
    trace.on_reward_finished(RewardFinished(uid="a/0", reward=0.5, seconds=0.1, key="a", started_at=now + 1))
    end(trace, "a", 0.5)
    trace.close()
    events = written(tmp_path / "run.json")

    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    drawn = [(names.get(e["pid"], "driver"), e["name"], e["dur"]) for e in events if e.get("cat") == "memory"]
    assert drawn == [("replica 1", "weights", 250000.0), ("replica 1", "sleep", 1e6), ("driver", "offload", 1e6)]
    assert [e["name"] for e in events if e["ph"] == "i"] == ["worker 2 restarted", "3 episodes run again"]
    assert_nested(events)


def test_a_path_that_cannot_be_written(tmp_path):
    """
    One line says so, before anything runs.
    """
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"trace file .*: cannot be written"):
        TraceFile(tmp_path / "file" / "run.json").open()


def test_config():
    """The registered observer takes a path."""
    assert TraceFileConfig(path="x").path == "x"
