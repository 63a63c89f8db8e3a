"""The default router: stickiness, prefixes and load."""

import pytest
from attrs import evolve
from hypothesis import given, settings

from turnwise.protocols import ReplicaLoad
from turnwise_routers import LeastTokens, LeastTokensConfig
from turnwise_routers.decision import Decision, Reason
from turnwise_testing.checks.router import GONE, histories, loads, without
from turnwise_testing.checks.router import routed_request as request


def least_tokens(**options):
    return LeastTokens(LeastTokensConfig(**options))


@given(history=histories)
@settings(deadline=None)
def test_release_forgets_all(history):
    """When all episodes have ended, nothing of them is left: no home, no weight, no group."""
    router = LeastTokens()
    for _, trajectory_id, num_tokens, group_id, replicas in history:
        replicas = [evolve(replica, available=True) for replica in replicas] or loads(0)
        router.choose(request(trajectory_id, num_tokens, group_id), replicas)
    for _, trajectory_id, *_ in history:
        router.release(trajectory_id)
    assert ({}, {}) == (router._stays, router._holders)
    assert not any(router._resident)


def test_reasons_of_an_episode_that_moves():
    """The first turn, a turn at home, and the turn after the replica has left have different reasons."""
    router, replicas = LeastTokens(), loads(0, 0, 0)
    first = router.decide(request("a"), replicas)
    second = router.decide(request("a"), without(replicas, first.index))
    assert (Reason.FIRST, Reason.LEFT) == (first.reason, second.reason)
    assert Decision(second.index, Reason.STICKY) == router.decide(request("a/p1"), replicas)
    router.release("a/p1")
    assert router.decide(request("a"), replicas).reason is Reason.FIRST


# The rules


def test_least_tokens_counts_tokens():
    """The least tokens win, whatever the requests."""
    replicas = [ReplicaLoad(num_requests=1, num_tokens=900), ReplicaLoad(num_requests=9, num_tokens=800)]
    assert Decision(1, Reason.FIRST) == LeastTokens().decide(request("a"), replicas)


def test_ties_are_broken_by_the_id():
    """Ties break by id, so that workers that start at once do not all choose the first replica."""
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
    """The episode's own tokens count as no overload."""
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
    "options",
    [
        {"break_ratio": 0.9},
        {"break_ratio": float("nan")},
        {"break_ratio": float("inf")},
        {"break_margin": -1.0},
        {"prefix_slack": -0.1},
        {"resident_weight": -1.0},
    ],
)
def test_bad_options(options):
    """An option out of its range is refused by its name."""
    with pytest.raises(ValueError, match=next(iter(options))):
        LeastTokensConfig(**options)
