"""Tokens of a turn reach an agent in a worker before the end of the turn, which a replica samples."""

import pytest
from ray_runs import FINISHED, ON_RAY, make_manager, make_tasks
from stream_blueprint import StreamBlueprint

from turnwise.runtime.plan import RolloutPlan

pytestmark = [*ON_RAY, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
PLAN = RolloutPlan(default_agent="listener", agents={"listener": None})


def test_an_agent_hears_tokens_before_the_end_of_its_turn(tmp_path):
    """Each turn ends only when its agent has heard its first half."""
    with make_manager(StreamBlueprint(folder=str(tmp_path)), plan=PLAN) as manager:
        results = manager.rollout(make_tasks(6))

    assert {result.status for result in results} <= FINISHED
    assert [1.0] * 6 == [result.metrics.extra["heard_first"] for result in results]
