"""
Requirements of every router, as plain functions without pytest.

A check takes a `RouterProbe`, whose requests, loads and histories are made here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import EngineError
from turnwise.protocols import ReplicaLoad, Router
from turnwise.types import GenerateRequest, SamplingParams
from turnwise_testing.checks.check import Check, register
from turnwise_testing.checks.part import PartChecks
from turnwise_testing.probes.engine import expect, expect_equal

GONE = ReplicaLoad(available=False)
Action = tuple[str, str, int, str, list[ReplicaLoad]]
"""A kind (`choose` or `release`), a trajectory id, tokens of the context, a group id, and the replicas."""

_replicas = st.lists(
    st.builds(
        ReplicaLoad,
        num_requests=st.integers(0, 50),
        num_tokens=st.integers(0, 10_000),
        available=st.sampled_from([True, True, False]),
    ),
    max_size=5,
)
histories: st.SearchStrategy[list[Action]] = st.lists(
    st.tuples(
        st.sampled_from(["choose", "choose", "choose", "release"]),
        st.sampled_from(["a", "b", "c", "d", "a/p1", "b/p2", "c/0/1"]),
        st.integers(1, 2000),
        st.sampled_from(["", "g", "h"]),
        _replicas,
    ),
    max_size=30,
)


@frozen(kw_only=True)
class RouterProbe:
    """The probe of a router: `make_router` builds it, as the registered factory does."""

    make_router: Callable[[], Router]


def routed_request(trajectory_id: str, num_tokens: int = 100, group_id: str = "") -> GenerateRequest:
    """Return a request of a trajectory with a context of zeros."""
    return GenerateRequest(
        request_id=f"r-{trajectory_id}",
        trajectory_id=trajectory_id,
        token_ids=np.zeros(num_tokens, np.int32),
        sampling=SamplingParams(),
        group_id=group_id,
    )


def loads(*num_tokens: int) -> list[ReplicaLoad]:
    """Return replicas with one request each and these numbers of tokens."""
    return [ReplicaLoad(num_requests=1, num_tokens=each) for each in num_tokens]


ROUTER_CHECKS: dict[str, Check] = {}
"""Every check by the name of its function without `check_`."""
ROUTERS = PartChecks(
    checks=ROUTER_CHECKS,
    probe=lambda part: RouterProbe(make_router=part.make),
)
_check = register(ROUTER_CHECKS)


@_check
def check_fulfils_the_protocol(probe: RouterProbe) -> None:
    """The factory returns an object with the methods of a router, and releasing an unknown id does nothing."""
    router = probe.make_router()
    expect(isinstance(router, Router), "it is no Router: it lacks `choose` or `release`")
    router.release("never seen")
    expect_equal(router.choose(routed_request("a"), loads(0)), 0, "the choice from one replica")


@_check
def check_chooses_available_replicas(probe: RouterProbe) -> None:
    """After any history the choice is an available replica, or an `EngineError` if there is none."""

    # A function of this call: hypothesis refuses one method that several subclasses share.
    @given(history=histories)
    @settings(deadline=None, database=None, report_multiple_bugs=False)
    def check(history: list[Action]) -> None:
        replay(probe.make_router(), history)

    check()


@_check
def check_paths_follow_their_episode(probe: RouterProbe) -> None:
    """The part of an id after the slash has no effect: paths and records of an episode share a prefix cache."""
    router, replicas = probe.make_router(), [ReplicaLoad() for _ in range(4)]
    home = router.choose(routed_request("abc/p1"), replicas)
    router.choose(routed_request("other"), replicas)
    expect_equal(router.choose(routed_request("abc/p2"), replicas), home, "the replica of another path")
    expect_equal(router.choose(routed_request("abc"), replicas), home, "the replica of the episode")


@_check
def check_stays_after_a_move(probe: RouterProbe) -> None:
    """An episode whose replica left stays on the next one, also when the first comes back."""
    router, replicas = probe.make_router(), loads(0, 0, 0)
    first = router.choose(routed_request("a"), replicas)
    second = router.choose(routed_request("a"), without(replicas, first))
    expect(second != first, f"it chose replica {first}, which is not available")
    expect_equal(router.choose(routed_request("a"), replicas), second, "the replica after the first one came back")


def replay(router: Router, history: Sequence[Action]) -> None:
    """Run a history and assert that each choice is available."""
    for kind, trajectory_id, num_tokens, group_id, replicas in history:
        request = routed_request(trajectory_id, num_tokens, group_id)
        if kind == "release":
            router.release(trajectory_id)
        elif any(replica.available for replica in replicas):
            chosen = router.choose(request, replicas)
            expect(type(chosen) is int, f"choose returned {chosen!r}, expected the index of a replica")
            expect(0 <= chosen < len(replicas), f"choose returned {chosen} for {len(replicas)} replicas")
            expect(replicas[chosen].available, f"it chose replica {chosen}, which is not available")
        else:
            with suppress(EngineError):
                chosen = router.choose(request, replicas)
                raise AssertionError(f"choose returned {chosen!r} without an available replica, expected EngineError")


def without(replicas: Sequence[ReplicaLoad], index: int) -> list[ReplicaLoad]:
    """Return the replicas with one of them not available."""
    return [GONE if place == index else load for place, load in enumerate(replicas)]
