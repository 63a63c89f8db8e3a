"""The reason of each choice, for every router and any history."""

import pytest
from hypothesis import given, settings

from turnwise_routers import ConsistentHash, LeastRequests, LeastTokens, RoundRobin
from turnwise_routers.decision import Decision, Reason
from turnwise_testing.checks.router import histories
from turnwise_testing.checks.router import routed_request as request


@pytest.mark.parametrize("make", [RoundRobin, LeastRequests, ConsistentHash, LeastTokens])
@given(history=histories)
@settings(deadline=None)
def test_reasons(make, history):
    """An episode stays where it is until it is released, and leaves for a stated reason only."""
    router, homes = make(), {}
    for kind, trajectory_id, num_tokens, group_id, replicas in history:
        key = trajectory_id.partition("/")[0]
        if kind == "release":
            router.release(trajectory_id)
            homes.pop(key, None)
        elif any(replica.available for replica in replicas):
            decision = router.decide(request(trajectory_id, num_tokens, group_id), replicas)
            check_reason(decision, homes.get(key), replicas, looks_at_load=make is LeastTokens)
            homes[key] = decision.index
        assert len(homes) == len(router)


def check_reason(decision, home, replicas, *, looks_at_load):
    if home is None:
        assert decision.reason == Reason.FIRST or (looks_at_load and decision.reason == Reason.PREFIX)
    elif home >= len(replicas) or not replicas[home].available:
        assert Reason.LEFT == decision.reason
    elif decision.index == home or not looks_at_load:
        assert Decision(home, Reason.STICKY) == decision
    else:
        assert Reason.OVERLOADED == decision.reason
