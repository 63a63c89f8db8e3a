"""A service in the driver that agents in the workers of Ray call; workers are killed in mid-call."""

import os
import signal

import pytest
from ray_runs import ON_RAY, make_manager, make_tasks, pids, wait_until
from service_blueprint import Register, ServiceBlueprint, Visitor

from turnwise import Status
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.service import DriverServices

pytestmark = [*ON_RAY, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
PLAN = RolloutPlan(default_agent="visitor", agents={"visitor": None})


def make_visited():
    """Return a manager of two workers, and their service."""
    register: Register = Visitor().make_service()
    return make_manager(ServiceBlueprint(), plan=PLAN, services=DriverServices({"visitor": register})), register


def let_go(manager, register):
    async def go():
        register.goes_on.set()

    manager.call(go())


def test_workers_call_and_get_results_and_errors():
    """Also while they start; an error has its class and text, and the service's address is the driver's."""
    manager, register = make_visited()
    with manager:
        assert len(register.opened) == 2
        assert manager.addresses["driver"] == {"register": f"none://{manager.runtime.services.host}"}
        tasks = [*make_tasks(20), *make_tasks(2, prefix="refused")]
        finished = manager.iterate(tasks)
        wait_until(lambda: len(register.present) == 20, "not all episodes have called")
        let_go(manager, register)
        results = {result.task.uid: result for result in finished}
    for uid, result in results.items():
        if uid.startswith("refused"):
            assert (result.status, result.fault.kind) == (Status.FAILED, "ConfigError")
            assert "the register refuses it" in result.fault.message
        else:
            assert result.trajectories[0].input_ids[:3].tolist() == [1, 2, len(uid)]


def test_a_worker_is_killed_in_mid_call():
    """Its calls end in the service before its episodes call again from another worker; every episode ends once."""
    manager, register = make_visited()
    with manager:
        tasks = make_tasks(20)
        finished = manager.iterate(tasks)
        wait_until(lambda: len(register.present) == 20, "not all episodes have called")
        os.kill(pids(manager.runtime.workers.slots)[0], signal.SIGKILL)
        wait_until(lambda: len(register.left) == 10 and len(register.present) == 20, "no episode has called again")
        assert sorted(register.present) == sorted(task.uid for task in tasks)
        let_go(manager, register)
        results = list(finished)
    assert sorted(result.task.uid for result in results) == sorted(task.uid for task in tasks)
    assert {result.status for result in results} <= {Status.COMPLETED, Status.TRUNCATED}


def test_the_end_of_a_run_fails_calls_that_wait():
    """No caller hangs: an abort cancels the call, and the service sees that."""
    manager, register = make_visited()
    with manager:
        finished = manager.iterate(make_tasks(4))
        wait_until(lambda: len(register.present) == 4, "not all episodes have called")
        manager.abort()
        assert {result.status for result in finished} == {Status.ABORTED}
        wait_until(lambda: len(register.left) == 4, "the service has not seen the cancellations")
