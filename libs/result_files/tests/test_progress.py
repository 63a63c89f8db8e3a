"""The progress of a run."""

import io

from rich.console import Console
from structlog.testing import capture_logs

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
