"""Requests that kill replicas on a real Ray cluster: their episodes fail, and all others finish."""

import pytest
from ray_blueprint import LethalBlueprint
from ray_runs import FINISHED, ON_RAY, check_complete, make_manager, make_tasks

from turnwise import Status

pytestmark = [*ON_RAY, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_request_that_kills_replicas_fails_alone(replicas):
    """
    The engine's process ends in the turn of two tasks: these two episodes fail, owned by the engine, and the others
    finish although each replica may be restarted only three times in a row.
    """
    tasks = [*make_tasks(40), *make_tasks(2, "kills-replica")]
    with make_manager(LethalBlueprint(), replicas=replicas) as manager:
        results = manager.rollout(tasks)
        stats = manager.stats()

    check_complete(results, tasks)
    failed = {result.task.uid: result.fault for result in results if result.status is Status.FAILED}
    assert {uid: (fault.owner, fault.kind) for uid, fault in failed.items()} == dict.fromkeys(
        ("kills-replica0", "kills-replica1"), ("engine", "PoisonedRequestError")
    )
    assert all("replicas died while they ran this request" in fault.message for fault in failed.values())
    assert {result.status for result in results if result.task.uid not in failed} <= FINISHED
    assert 4 <= stats["replica_restarts"] <= 8  # each kills three, and the first two may be the same ones


def test_what_an_engine_raises_ends_no_replica():
    """
    A `CancelledError` is answered at once, not after the deadline of the turn, and an abort that raises costs nothing.
    """
    tasks = [*make_tasks(20), *make_tasks(1, "cancels-engine")]
    with make_manager(LethalBlueprint(token_latency_s=0.05, turn_s=0.5)) as manager:
        results = {result.task.uid: result for result in manager.rollout(tasks)}
        stats = manager.stats()

    fault = results["cancels-engine0"].fault
    assert (fault.owner, fault.kind, fault.message) == ("engine", "EngineError", "CancelledError:")
    assert {result.status for uid, result in results.items() if uid != "cancels-engine0"} <= {
        *FINISHED,
        Status.TIMED_OUT,
    }
    assert any(result.status is Status.TIMED_OUT for result in results.values()), "no abort was sent"
    assert stats["replica_restarts"] == 0
