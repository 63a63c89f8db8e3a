"""A run on Ray whose number of replicas changes between and during its calls."""

import threading

import pytest
from attrs import frozen
from ray_blueprint import LethalBlueprint, ScriptedBlueprint
from ray_runs import FINISHED, ON_RAY, check_complete, make_manager, make_tasks, pids, rollout_held, wait_until
from test_ray_weights import make_manager as make_weighted_manager
from test_ray_weights import versions_of, weights_of

from turnwise.errors import EngineError

pytestmark = [*ON_RAY, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


def serving(manager):
    """Return the number of requests that each replica has served."""
    import ray

    slots = manager.runtime.policy.slots
    return [ray.get(slot.handle.stats.remote())["bytes_in"] for slot in slots]


def is_alive(handle):
    """Return whether an actor answers."""
    import ray

    try:
        ray.get(handle.ping.remote())
    except ray.exceptions.RayActorError:
        return False
    return True


def test_new_replicas_serve_the_current_weights():
    """They get the version of the others before their first request, and removed replicas end."""
    with make_weighted_manager(replicas=1) as manager:
        manager.update_weights(weights_of(1))
        manager.resize(3)
        results = manager.rollout(make_tasks(12))
        assert {1} == versions_of(results)
        assert all(serving(manager))

        kept, *removed = [slot.handle for slot in manager.runtime.policy.slots]
        manager.resize(1)
        wait_until(lambda: not any(is_alive(handle) for handle in removed), "a removed replica runs")
        report = manager.update_weights(weights_of(2))
        assert [0] == [each.replica for each in report.replicas]
        assert {2} == versions_of(manager.rollout(make_tasks(4)))
        assert [kept] == [slot.handle for slot in manager.runtime.policy.slots]
        assert 0 == manager.stats()["replica_restarts"]


def test_new_replicas_wait_for_weights_that_are_not_kept():
    """The change of their number does not wait for the next update, which only its caller can make."""
    with make_weighted_manager(replicas=1, keep_last=False) as manager:
        manager.update_weights(weights_of(1))
        manager.resize(2)
        assert {1} == versions_of(manager.rollout(make_tasks(4)))
        report = manager.update_weights(weights_of(2))
        assert [0, 1] == sorted(each.replica for each in report.replicas)
        wait_until(lambda: len(pids(manager.runtime.policy.slots)) == 2, "the replica did not enter rotation")
        manager.resize(1)  # and one that still waits is removed as well
        manager.resize(2)
        manager.resize(1)
        assert {2} == versions_of(manager.rollout(make_tasks(4)))


def test_a_removed_replica_finishes_its_requests(tmp_path):
    """Each replica has held requests when one is removed: it ends with them, and none is repeated."""
    with make_manager(ScriptedBlueprint(folder=str(tmp_path)), workers=2, replicas=2) as manager:
        slots = manager.runtime.policy.slots
        leaving = slots[1]
        resizing = threading.Thread(target=manager.resize, args=(1,))

        def remove():
            resizing.start()
            wait_until(leaving.leaving.is_set, "the replica does not leave")
            assert 2 == len(pids([slots[0], leaving]))

        tasks = make_tasks(8)
        results = rollout_held(manager, tasks, remove)
        resizing.join()
        check_complete(results, tasks)
        assert {result.status for result in results} <= FINISHED
        assert [slots[0]] == slots
        assert leaving.handle is None
        assert 0 == manager.stats()["resent"]


@frozen
class BlueprintOfOne(LethalBlueprint):
    """A second engine does not start."""

    def make_engine(self):
        if pids_of_replicas() > 1:
            raise ValueError("there is one license")
        return super().make_engine()


def pids_of_replicas():
    """Return how many replicas of this run are alive, including this one."""
    import ray

    own = ray.get_runtime_context().get_actor_name().rsplit("-", 2)[0]
    actors = ray._private.state.actors().values()
    return sum(each["Name"].startswith(own) and each["State"] in ("ALIVE", "PENDING_CREATION") for each in actors)


def test_a_failed_growth_changes_nothing():
    """The error has the reason, and the run continues with the replicas that it had."""
    with make_manager(BlueprintOfOne(), replicas=1, workers=1, max_starts=1) as manager:
        with pytest.raises(EngineError, match=r"replica 1 could not be started: ValueError: there is one license"):
            manager.resize(2)
        assert 1 == len(manager.runtime.policy.slots)
        tasks = make_tasks(4)
        check_complete(manager.rollout(tasks), tasks)
        with pytest.raises(ValueError, match="at least 1 replica"):
            manager.resize(0)
