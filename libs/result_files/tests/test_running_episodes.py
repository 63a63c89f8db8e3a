"""The file of running episodes: it follows the events of a run, and ends with it."""

import json
import time

import pytest

from turnwise import Task
from turnwise.events.observer import EpisodesRetried, EpisodeStarted, RewardFinished, ToolFinished, TurnFinished
from turnwise.record.result import EpisodeResult
from turnwise.types import Status
from turnwise_result_files import RunningEpisodes, read_running, running_episodes


@pytest.fixture
def observer(tmp_path, monkeypatch):
    """An open observer that writes at once."""
    monkeypatch.setattr(running_episodes, "_WRITE_S", 0.001)
    observer = RunningEpisodes(tmp_path)
    observer.open()
    yield observer
    observer.close()


def start(observer, attempt, *, task="a", worker="worker 0", **values):
    observer.on_episode_started(
        EpisodeStarted(
            uid=f"{task}/0",
            key=attempt,
            worker=worker,
            task=Task(messages=(), uid=task),
            agent_name="agent",
            started_at=100.0,
            **values,
        )
    )


def wait_for(observer, condition):
    """Return the episodes once the file has a state."""
    while True:
        found = read_running(observer.folder)
        if found is not None and condition(found):
            return found["episodes"]
        time.sleep(0.001)


def test_the_file_has_the_turns_and_the_last_event_of_each_episode(observer):
    """Turns, sampled tokens and the last event are of the attempt, and an episode leaves the file when it ends."""
    start(observer, "k1", global_step=3)
    start(observer, "k2", task="b", validation=True)
    turn = {
        "num_context_tokens": 5,
        "num_cached_tokens": 0,
        "finish_reason": "stop",
        "started_at": 101.0,
        "seconds": 2.0,
    }
    observer.on_turn_finished(TurnFinished(uid="a/0", key="k1", num_new_tokens=7, **turn))
    observer.on_turn_finished(TurnFinished(uid="a/0", key="k1", num_new_tokens=4, **turn))
    observer.on_tool_finished(
        ToolFinished(uid="a/0", key="k1", tool="search", seconds=1.0, error=False, num_characters=3, started_at=104.0)
    )
    first, second = wait_for(observer, lambda found: found["episodes"][0]["last"] == "tool search")
    assert (first["key"], first["num_turns"], first["num_tokens"], first["last_at"]) == ("a/0@3", 2, 11, 105.0)
    assert (second["key"], second["num_turns"], second["last"]) == ("b/0-held-out", 0, "start")

    observer.on_reward_finished(RewardFinished(uid="b/0", key="k2", reward=1.0, seconds=1.0, started_at=110.0))
    observer.on_episode_finished(
        EpisodeResult(task=Task(messages=(), uid="a"), agent_name="agent", status=Status.COMPLETED, key="k1")
    )
    (left,) = wait_for(observer, lambda found: found["total"] == 1)
    assert (left["key"], left["last"]) == ("b/0-held-out", "reward")


def test_an_attempt_that_ended_without_a_result_leaves_the_file(observer):
    """The episodes of a dead worker, and an attempt that a later batch continues, are not shown twice."""
    start(observer, "k1")
    start(observer, "k2", task="b", worker="worker 1")
    observer.on_episodes_retried(EpisodesRetried(count=1, worker="worker 0", reason="died"))
    start(observer, "k3", task="b", worker="worker 1")

    wait_for(observer, lambda found: [each["key"] for each in found["episodes"]] == ["b/0"])


def test_the_file_ends_with_the_run_and_is_no_longer_read_after_a_kill(observer, monkeypatch):
    """A closed observer leaves no file; a file of a killed run is not of running episodes."""
    start(observer, "k1")
    wait_for(observer, lambda found: found["total"] == 1)
    file = observer.folder / running_episodes.RUNNING_FILE
    text = file.read_text()
    observer.close()
    assert not file.exists()
    assert read_running(observer.folder) is None

    file.write_text(text)
    assert read_running(observer.folder) is not None
    file.write_text(json.dumps(json.loads(text) | {"written_at": time.time() - 60}))
    assert read_running(observer.folder) is None
    file.write_text("{")
    assert read_running(observer.folder) is None


def test_a_file_without_changes_is_kept_alive(observer, monkeypatch):
    """While an episode runs without an event, the file says that its run is alive."""
    monkeypatch.setattr(running_episodes, "_BEAT_S", 0.0)
    start(observer, "k1")
    wait_for(observer, lambda found: True)
    first = read_running(observer.folder)["written_at"]
    wait_for(observer, lambda found: found["written_at"] > first)
