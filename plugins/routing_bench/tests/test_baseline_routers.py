"""The routers to compare with: stickiness, and the choice for a new episode."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import EngineError
from turnwise.protocols import ReplicaLoad, Router
from turnwise.types import GenerateRequest, SamplingParams
from turnwise_routing_bench.baseline_routers import (
    ConsistentHash,
    ConsistentHashConfig,
    Decision,
    LeastRequests,
    RoundRobin,
)

GONE = ReplicaLoad(available=False)
every_router = pytest.mark.parametrize("make", [RoundRobin, LeastRequests, ConsistentHash])


def request(trajectory_id, num_tokens=100, group_id=""):
    return GenerateRequest(
        request_id=f"r-{trajectory_id}",
        trajectory_id=trajectory_id,
        token_ids=np.zeros(num_tokens, np.int32),
        sampling=SamplingParams(),
        group_id=group_id,
    )


def loads(*num_tokens):
    return [ReplicaLoad(num_requests=1, num_tokens=each) for each in num_tokens]


replicas_of = st.lists(
    st.builds(
        ReplicaLoad,
        num_requests=st.integers(0, 50),
        num_tokens=st.integers(0, 10_000),
        available=st.sampled_from([True, True, False]),
    ),
    min_size=1,
    max_size=5,
)
actions = st.lists(
    st.tuples(
        st.sampled_from(["choose", "choose", "choose", "release"]),
        st.sampled_from(["a", "b", "c", "d", "a/p1", "b/p2", "c/0/1"]),
        st.integers(1, 2000),
        st.sampled_from(["", "g", "h"]),
        replicas_of,
    ),
    max_size=30,
)


@every_router
@given(actions=actions)
@settings(deadline=None)
def test_any_history(make, actions):
    """Whatever happens, a choice is available, stays at home until released, and leaves only with its replica."""
    router, homes = make(), {}
    for action, trajectory_id, num_tokens, group_id, replicas in actions:
        key = trajectory_id.partition("/")[0]
        if action == "release":
            router.release(trajectory_id)
            homes.pop(key, None)
        elif not any(replica.available for replica in replicas):
            home = homes.get(key)
            with pytest.raises(EngineError, match=f"no replica is available: all {len(replicas)} are dead"):
                router.choose(request(trajectory_id, num_tokens, group_id), replicas)
            assert home == homes.get(key)
        else:
            decision = router.decide(request(trajectory_id, num_tokens, group_id), replicas)
            assert replicas[decision.index].available
            check_reason(decision, homes.get(key), replicas)
            homes[key] = decision.index
        assert len(homes) == len(router)


def check_reason(decision, home, replicas):
    if home is None:
        assert "first" == decision.reason
    elif home >= len(replicas) or not replicas[home].available:
        assert "left" == decision.reason
    else:
        assert Decision(home, "sticky") == decision


@every_router
def test_fulfils_the_protocol(make):
    """The router has the protocol's methods, and releasing an unknown id does nothing."""
    router = make()
    assert isinstance(router, Router)
    router.release("never seen")
    assert router.choose(request("a"), loads(0)) == 0


@every_router
def test_no_replicas(make):
    """An empty list of replicas is an error that says so."""
    with pytest.raises(EngineError, match="all 0 are dead"):
        make().choose(request("a"), [])


@every_router
def test_paths_go_where_their_episode_is(make):
    """The part after the slash has no effect on choosing and releasing."""
    router = make()
    replicas = [ReplicaLoad() for _ in range(4)]
    home = router.choose(request("abc/p1"), replicas)
    router.choose(request("other"), replicas)
    assert Decision(home, "sticky") == router.decide(request("abc/p2"), replicas)
    assert Decision(home, "sticky") == router.decide(request("abc"), replicas)
    router.release("abc/p1")
    assert router.decide(request("abc"), replicas).reason == "first"


@every_router
def test_stays_where_it_went(make):
    """An episode whose replica left stays on the next one, also when the first comes back."""
    router = make()
    replicas = loads(0, 0, 0)
    first = router.choose(request("a"), replicas)
    without = [GONE if index == first else load for index, load in enumerate(replicas)]
    second = router.decide(request("a"), without)
    assert second.reason == "left"
    assert Decision(second.index, "sticky") == router.decide(request("a"), replicas)


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
    without = [GONE if index == gone else load for index, load in enumerate(replicas)]
    before, after = ConsistentHash(), ConsistentHash()
    for number in range(50):
        old, new = before.choose(request(f"t{number}"), replicas), after.choose(request(f"t{number}"), without)
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
