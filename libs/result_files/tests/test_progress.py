"""The progress of a run."""

import io

from rich.console import Console
from structlog.testing import capture_logs

from turnwise.events.observer import RunWaiting, Wait
from turnwise_result_files import progress
from turnwise_result_files.progress import Tally, progress_view


def test_the_rate_leaves_out_the_start_of_the_engines(monkeypatch):
    """Engines that took a minute to start do not slow the rate of tokens down."""
    now = 1_000.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    tally = Tally(started=now)
    now += 60.0
    with capture_logs() as lines, progress_view(tally, 1, Console(file=io.StringIO())):
        tally.num_tokens = 500
        now += 2.0

    assert [line["tokens_per_s"] for line in lines if line["event"] == "rollout ended"] == [250]


def test_the_bar_says_what_the_run_waits_for():
    """Without any event that would update it, and only until the run continues."""
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    tally = Tally()
    waits = tuple(Wait(part=f"replica {i}", num_episodes=2, seconds=12.0, uid="t/0", worker="w") for i in range(3))
    with progress_view(tally, 1, console):
        tally.on_run_waiting(RunWaiting(seconds=12.0, waits=waits))
    assert (
        "waits for 2 episodes: replica 0 for 12 s, longest t/0 on w; 2 episodes: replica 1" in console.file.getvalue()
    )
    assert "1 more" in console.file.getvalue()

    tally.on_run_waiting(RunWaiting(seconds=0.0))
    with progress_view(tally, 1, Console(file=(after := io.StringIO()), force_terminal=True, width=200)):
        pass
    assert "waits" not in after.getvalue()
