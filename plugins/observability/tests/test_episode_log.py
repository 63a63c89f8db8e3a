"""The observer `episode_log`."""

from structlog.testing import capture_logs

from turnwise.record.result import EpisodeResult
from turnwise.types import EpisodeMetrics, Status, Task
from turnwise_observability.episode_log import EpisodeLog


def test_a_line_has_replicas_and_recorded_metrics():
    """Whatever an agent, a tool or a middleware records is in the line of its episode."""
    metrics = EpisodeMetrics(replicas=(1, 0), extra={"max_parallel_calls_hit": 2.0, "programs_passed": 3.0})
    with capture_logs() as lines:
        EpisodeLog().on_episode_finished(
            EpisodeResult(task=Task(messages=(), uid="t"), status=Status.COMPLETED, metrics=metrics, key="k")
        )

    (line,) = lines
    assert (line["key"], line["replicas"]) == ("k", [1, 0])
    assert line["extra"] == {"max_parallel_calls_hit": 2.0, "programs_passed": 3.0}
