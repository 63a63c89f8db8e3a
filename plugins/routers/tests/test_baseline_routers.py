"""The routers to compare with: stickiness, and the choice for a new episode."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.protocols import ReplicaLoad
from turnwise_routers import ConsistentHash, ConsistentHashConfig, LeastRequests, RoundRobin
from turnwise_testing.checks.router import GONE, loads, without
from turnwise_testing.checks.router import routed_request as request

every_router = pytest.mark.parametrize("make", [RoundRobin, LeastRequests, ConsistentHash])


# The rules


def test_round_robin():
    """In turn, over the available replicas."""
    router = RoundRobin()
    replicas = [ReplicaLoad(), GONE, ReplicaLoad()]
    assert [0, 2, 0, 2] == [router.choose(request(name), replicas) for name in "abcd"]


def test_least_requests():
    """The fewest requests, whatever their tokens; the first of equals."""
    replicas = [ReplicaLoad(num_requests=3), ReplicaLoad(num_requests=1, num_tokens=9999), ReplicaLoad(num_requests=1)]
    assert LeastRequests().choose(request("a"), replicas) == 1


@given(num_replicas=st.integers(2, 6), data=st.data())
@settings(deadline=None)
def test_consistent_hash_moves_only_what_it_must(num_replicas, data):
    """When a replica is gone, exactly its own episodes go elsewhere."""
    gone = data.draw(st.integers(0, num_replicas - 1))
    replicas = [ReplicaLoad() for _ in range(num_replicas)]
    before, after = ConsistentHash(), ConsistentHash()
    for number in range(50):
        old, new = (
            before.choose(request(f"t{number}"), replicas),
            after.choose(request(f"t{number}"), without(replicas, gone)),
        )
        assert (old == gone) == (old != new)


@given(num_replicas=st.integers(2, 6))
@settings(deadline=None)
def test_consistent_hash_when_the_last_leaves_the_list(num_replicas):
    """A list that is one shorter moves only the episodes of the last replica, and loads play no part."""
    before, after = ConsistentHash(), ConsistentHash()
    for number in range(50):
        old = before.choose(request(f"t{number}"), loads(*range(num_replicas)))
        new = after.choose(request(f"t{number}"), loads(*range(num_replicas - 1)))
        assert (old == num_replicas - 1) == (old != new)


def test_consistent_hash_spreads():
    """No replica of four gets less than half or more than twice its share of 2,000 episodes."""
    router = ConsistentHash()
    counts = np.bincount([router.choose(request(f"t{number}"), loads(0, 0, 0, 0)) for number in range(2000)])
    assert counts.min() > 250
    assert counts.max() < 1000


@pytest.mark.parametrize("points", [0, 65537])
def test_bad_options(points):
    """An option out of its range is rejected by its name."""
    with pytest.raises(ValueError, match="points_per_replica"):
        ConsistentHashConfig(points_per_replica=points)
