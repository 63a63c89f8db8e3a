"""Tests of `turnwise.routing`."""

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import EngineError
from turnwise.protocols import ReplicaLoad, Resources, Router
from turnwise.routing import (
    ROUTERS,
    ConsistentHash,
    ConsistentHashConfig,
    Decision,
    LeastRequests,
    LeastTokens,
    LeastTokensConfig,
    Reason,
    RoundRobin,
)
from turnwise.types import GenerateRequest, SamplingParams

GONE = ReplicaLoad(available=False)
every_router = pytest.mark.parametrize("name", sorted(ROUTERS))


def make(name):
    factory, config = ROUTERS[name]
    return factory(config(), Resources())


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


def least_tokens(**options):
    return LeastTokens(LeastTokensConfig(**options))


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
def test_any_history(name, actions):
    """Whatever happens, a choice is available, stays at home until released, and leaves for a stated reason only."""
    router, homes = make(name), {}
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
            check_reason(name, decision, homes.get(key), replicas)
            homes[key] = decision.index
        assert len(homes) == len(router)


def check_reason(name, decision, home, replicas):
    if home is None:
        assert decision.reason in (Reason.FIRST, Reason.PREFIX)
    elif home >= len(replicas) or not replicas[home].available:
        assert Reason.LEFT == decision.reason
    elif decision.index == home:
        assert Reason.STICKY == decision.reason
    else:
        assert (name, Reason.OVERLOADED) == ("least_tokens", decision.reason)


@given(actions=actions)
@settings(deadline=None)
def test_release_forgets_all(actions):
    """When all episodes have ended, nothing of them is left: no home, no weight, no group."""
    router = LeastTokens()
    for _, trajectory_id, num_tokens, group_id, replicas in actions:
        replicas = [evolve(replica, available=True) for replica in replicas]
        router.choose(request(trajectory_id, num_tokens, group_id), replicas)
    for _, trajectory_id, *_ in actions:
        router.release(trajectory_id)
    assert ({}, {}) == (router._stays, router._holders)
    assert not any(router._resident)


@every_router
def test_fulfils_the_protocol(name):
    """What the registry gets is a router, and releasing what it never saw does nothing."""
    router = make(name)
    assert isinstance(router, Router)
    router.release("never seen")
    assert router.choose(request("a"), loads(0)) == 0


@every_router
def test_no_replicas(name):
    """An empty list of replicas is an error that says so."""
    with pytest.raises(EngineError, match="all 0 are dead"):
        make(name).choose(request("a"), [])


@every_router
def test_paths_go_where_their_episode_is(name):
    """What follows the slash plays no part, in choosing and in releasing."""
    router = make(name)
    replicas = [ReplicaLoad() for _ in range(4)]
    home = router.choose(request("abc/p1"), replicas)
    router.choose(request("other"), replicas)
    assert Decision(home, Reason.STICKY) == router.decide(request("abc/p2"), replicas)
    assert Decision(home, Reason.STICKY) == router.decide(request("abc"), replicas)
    router.release("abc/p1")
    assert router.decide(request("abc"), replicas).reason is Reason.FIRST


@every_router
def test_stays_where_it_went(name):
    """An episode whose replica left stays on the next one, also when the first comes back."""
    router = make(name)
    replicas = loads(0, 0, 0)
    first = router.choose(request("a"), replicas)
    without = [GONE if index == first else load for index, load in enumerate(replicas)]
    second = router.decide(request("a"), without)
    assert second.reason is Reason.LEFT
    assert Decision(second.index, Reason.STICKY) == router.decide(request("a"), replicas)


# The rules to compare with


def test_round_robin():
    """In turn, over those that are available."""
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


# Ours


def test_least_tokens_counts_tokens():
    """The least tokens win, whatever the requests."""
    replicas = [ReplicaLoad(num_requests=1, num_tokens=900), ReplicaLoad(num_requests=9, num_tokens=800)]
    assert Decision(1, Reason.FIRST) == LeastTokens().decide(request("a"), replicas)


def test_ties_are_broken_by_the_id():
    """Of equal replicas the id chooses, so that workers that all begin at once do not all begin with the first."""
    chosen = {LeastTokens().choose(request(f"t{number}"), loads(0, 0, 0, 0)) for number in range(40)}
    assert {0, 1, 2, 3} == chosen


def test_what_waits_for_a_tool_counts():
    """An episode at home weighs on its replica between its turns, by `resident_weight`."""
    idle = loads(0, 0)
    router = least_tokens(resident_weight=0.5)
    first = router.choose(request("a", 1000), idle)
    assert router.choose(request("b", 10), idle) == 1 - first
    busy = [ReplicaLoad(num_tokens=0 if index == first else 600) for index in range(2)]
    assert router.choose(request("c", 10), busy) == first


def test_prefers_the_group_prompt():
    """A replica that holds the prompt is preferred while it is ahead by no more than `prefix_slack` contexts."""
    router = least_tokens(prefix_slack=2, resident_weight=0)
    assert router.choose(request("a", 100, "g"), loads(0, 1)) == 0
    assert Decision(0, Reason.PREFIX) == router.decide(request("b", 100, "g"), loads(1200, 1000))
    assert Decision(1, Reason.FIRST) == router.decide(request("c", 100, "g"), loads(1201, 1000))
    assert Decision(1, Reason.FIRST) == router.decide(request("d", 100, "other"), loads(1200, 1000))


def test_of_two_holders_the_freer():
    """Of several replicas that hold the prompt the least loaded is taken, and one that has left does not count."""
    router = least_tokens(prefix_slack=100, resident_weight=0)
    router.choose(request("a", 100, "g"), loads(0, 1, 2))
    router.choose(request("b", 100, "g"), [GONE, *loads(0, 1)])
    assert Decision(1, Reason.PREFIX) == router.decide(request("c", 100, "g"), loads(200, 100, 0))
    assert Decision(0, Reason.PREFIX) == router.decide(request("d", 100, "g"), [*loads(200), GONE, *loads(0)])


def test_a_group_that_has_ended_is_forgotten():
    """When the last of a group has ended, its prompt is not counted on any more."""
    router = least_tokens(prefix_slack=100, resident_weight=0)
    router.choose(request("a", 100, "g"), loads(0, 1))
    router.release("a")
    assert Decision(1, Reason.FIRST) == router.decide(request("b", 100, "g"), loads(1, 0))


def test_leaves_an_overloaded_replica():
    """Beyond `break_ratio` times the mean an episode moves to the least loaded, and not at it."""
    router = least_tokens(break_ratio=1.5, resident_weight=0)
    router.choose(request("a"), loads(0, 1))
    assert Decision(0, Reason.STICKY) == router.decide(request("a"), loads(3000, 1000))
    assert Decision(1, Reason.OVERLOADED) == router.decide(request("a"), loads(3001, 1000))
    assert Decision(1, Reason.STICKY) == router.decide(request("a"), loads(1000, 1000))


def test_does_not_leave_for_little():
    """A gap that the episode's own context would close again is no reason to prefill it elsewhere."""
    router = least_tokens(break_ratio=1.5, break_margin=1, resident_weight=0)
    router.choose(request("a", 1000), loads(0, 1))
    assert Decision(0, Reason.STICKY) == router.decide(request("a", 1000), loads(1000, 0))
    assert Decision(1, Reason.OVERLOADED) == router.decide(request("a", 1000), loads(1001, 0))


def test_a_lone_episode_does_not_flee_from_itself():
    """What an episode itself weighs at home is no overload."""
    router = least_tokens(resident_weight=2, break_ratio=1, break_margin=0)
    home = router.choose(request("a", 1000), loads(0, 0))
    assert Decision(home, Reason.STICKY) == router.decide(request("a", 2000), loads(0, 0))


def test_replicas_that_left_are_not_in_the_mean():
    """The load of a replica that is not available says nothing about the others."""
    router = least_tokens(break_ratio=1.1, resident_weight=0)
    router.choose(request("a"), loads(0, 1, 1))
    replicas = [*loads(5000, 5000), ReplicaLoad(num_tokens=0, available=False)]
    assert Decision(0, Reason.STICKY) == router.decide(request("a"), replicas)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (LeastTokensConfig, {"break_ratio": 0.9}),
        (LeastTokensConfig, {"break_ratio": float("nan")}),
        (LeastTokensConfig, {"break_ratio": float("inf")}),
        (LeastTokensConfig, {"break_margin": -1.0}),
        (LeastTokensConfig, {"prefix_slack": -0.1}),
        (LeastTokensConfig, {"resident_weight": -1.0}),
        (ConsistentHashConfig, {"points_per_replica": 0}),
        (ConsistentHashConfig, {"points_per_replica": 65537}),
    ],
)
def test_bad_options(config, options):
    """An option out of its range is refused by its name."""
    with pytest.raises(ValueError, match=next(iter(options))):
        config(**options)
