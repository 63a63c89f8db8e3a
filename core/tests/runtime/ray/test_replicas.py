"""The pool of replicas tells its clients why a replica has gone. Without Ray."""

from types import SimpleNamespace

import pytest

from turnwise.config.runtime import RayConfig
from turnwise.runtime.placement import PoolPlacement
from turnwise.runtime.ray import calls, replicas
from turnwise.runtime.ray.replicas import ReplicaGroup
from turnwise.runtime.remote.supervision import make_slots


@pytest.fixture
def kills(monkeypatch):
    """Actors that were killed."""
    found = []
    monkeypatch.setattr(calls, "kill", found.append)
    monkeypatch.setattr(replicas, "kill", found.append)
    return found


def make_group(posted):
    """Return a pool of a replica with a client; `posted` receives the client's messages about lost replicas."""
    (client,) = make_slots("worker", 1)
    method = SimpleNamespace(remote=lambda *arguments: posted.append(arguments[1:]))
    method.options = lambda **_options: method
    client.handle = SimpleNamespace(replica_down=method)
    cluster = SimpleNamespace(run_name="r")
    group = ReplicaGroup(None, PoolPlacement(num_replicas=1), RayConfig(), cluster, lambda: [client])
    group.slots[0].handle = "actor"
    return group


def test_a_replica_that_the_driver_killed_blames_no_request(kills):
    """The driver kills a replica that is late with weights. Requests may have caused the next death."""
    posted = []
    group = make_group(posted)
    (slot,) = group.slots

    group.kill_replica(slot, "it was late")
    group.release(slot)
    slot.handle = "next actor"
    group.release(slot)

    assert [True, False] == [blameless for *_rest, blameless in posted]
    assert ["actor", "actor", "next actor"] == kills


def test_a_replica_that_leaves_blames_no_request(kills):
    """Requests did not cause the end of a replica whose node is drained."""
    posted = []
    group = make_group(posted)
    group.slots[0].leave("its node is drained")

    group.release(group.slots[0])

    assert [(0, "replica 0: its node is drained", "policy", True)] == posted
    assert ["actor"] == kills
