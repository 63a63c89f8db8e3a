"""The observer `episode_log`."""

import numpy as np
from structlog.testing import capture_logs

from turnwise.episode.setup import Limits
from turnwise.events.dispatch import Observers
from turnwise.record.result import EpisodeResult
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.worker import WorkerComponents
from turnwise.types import EpisodeMetrics, Status, Task
from turnwise_observability.episode_log import EpisodeLog
from turnwise_testing.engines.scripted import RandomPolicy, ScriptedEngine


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


def test_switches_of_memory_and_updates_of_weights_have_lines():
    """The log has the seconds of sleep, wake-up and weight sync, and the memory before and after."""
    engine = ScriptedEngine(policy=RandomPolicy(seed=1, vocab_size=9, end_token_id=8, mean_tokens=4))
    runtime = LocalRuntime(engine, WorkerComponents(engine=engine, programs={}, limits=Limits()))
    plan = RolloutPlan(default_agent="a", agents={"a": None})
    with capture_logs() as lines, RolloutManager(runtime, plan, Observers.of([EpisodeLog()])) as manager:
        manager.sleep()
        manager.wake_up()
        manager.update_weights([("w", np.zeros(3, np.float32))])

    told = [line for line in lines if line["event"] in ("memory switched", "weights updated")]
    assert ["sleep", "wake_up_weights_kv_cache", 1] == [line.get("stage", line.get("version")) for line in told]
    assert all(line["seconds"] >= 0 and line["replica"] == 0 for line in told)
    assert all({"bytes_before", "bytes_after"} <= line.keys() for line in told[:2])
    assert 12 == told[2]["num_bytes"]
