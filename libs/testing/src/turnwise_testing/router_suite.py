"""The conformance suite of routers, with the requests, loads and histories that it makes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import EngineError
from turnwise.protocols import ReplicaLoad, Resources, Router
from turnwise.types import GenerateRequest, SamplingParams
from turnwise_testing.suite import PluginSuite

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


class RouterSuite(PluginSuite):
    """
    The conformance suite of routers. A plugin's whole file::

        class TestFewestTokens(RouterSuite):
            entry_point = "fewest_tokens"
            module = "turnwise_fewest_tokens"
            registered = "fewest_tokens"

    May be overridden: `config` and `resources`.
    """

    hook = "register_routers"

    @pytest.fixture
    def router(self, config: object, resources: Resources) -> Router:
        """A new router."""
        made: Router = self.entry().factory(config, resources)
        return made

    def test_fulfils_the_protocol(self, router: Router) -> None:
        """The factory returns an object with the methods of a router, and releasing an unknown id does nothing."""
        assert isinstance(router, Router)
        router.release("never seen")
        assert router.choose(routed_request("a"), loads(0)) == 0

    def test_chooses_available_replicas(self, config: object, resources: Resources) -> None:
        """After any history the choice is an available replica, or an `EngineError` if there is none."""
        factory = self.entry().factory

        # A function of this call: hypothesis refuses one method that several subclasses share.
        @given(history=histories)
        @settings(deadline=None)
        def check(history: list[Action]) -> None:
            replay(factory(config, resources), history)

        check()

    def test_paths_follow_their_episode(self, router: Router) -> None:
        """The part of an id after the slash has no effect: paths and records of an episode share a prefix cache."""
        replicas = [ReplicaLoad() for _ in range(4)]
        home = router.choose(routed_request("abc/p1"), replicas)
        router.choose(routed_request("other"), replicas)
        assert home == router.choose(routed_request("abc/p2"), replicas)
        assert home == router.choose(routed_request("abc"), replicas)

    def test_stays_after_a_move(self, router: Router) -> None:
        """An episode whose replica left stays on the next one, also when the first comes back."""
        replicas = loads(0, 0, 0)
        first = router.choose(routed_request("a"), replicas)
        second = router.choose(routed_request("a"), without(replicas, first))
        assert second != first
        assert second == router.choose(routed_request("a"), replicas)


def replay(router: Router, history: Sequence[Action]) -> None:
    """Run a history and assert that each choice is available."""
    for kind, trajectory_id, num_tokens, group_id, replicas in history:
        request = routed_request(trajectory_id, num_tokens, group_id)
        if kind == "release":
            router.release(trajectory_id)
        elif any(replica.available for replica in replicas):
            assert replicas[router.choose(request, replicas)].available
        else:
            with pytest.raises(EngineError):
                router.choose(request, replicas)


def without(replicas: Sequence[ReplicaLoad], index: int) -> list[ReplicaLoad]:
    """Return the replicas with one of them not available."""
    return [GONE if place == index else load for place, load in enumerate(replicas)]
