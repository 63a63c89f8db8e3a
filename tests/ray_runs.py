"""Parts that the tests on Ray share: a plan, tasks, and ways to disturb a run and to wait for its recovery."""

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from ray_blueprint import ScriptedBlueprint

from turnwise import Status, Task
from turnwise.config.parts import Choice
from turnwise.config.run import JudgeConfig
from turnwise.config.runtime import PoolConfig, RayConfig, RuntimeConfig
from turnwise.events.dispatch import Observers
from turnwise.events.observer import Observer
from turnwise.record.invariants import check_trajectory
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.placement import plan_runtime_placement
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.ray.runtime import RayRuntime
from turnwise.runtime.service import DriverServices

PLAN = RolloutPlan(default_agent="four", agents={"four": None})
ON_RAY = [pytest.mark.ray]
"""Marks of a test that starts actors."""

WATCHED = {"heartbeat_timeout_s": 10.0}
"""
Options of a manager whose actors hang in a test. All others wait longer than a busy machine keeps an actor from an
answer: an actor that is killed for being slow makes a test fail that counts restarts.
"""

FINISHED = {Status.COMPLETED, Status.TRUNCATED}
"""Statuses of an episode that finished by itself: its last turn may have reached the token limit."""


def make_manager(
    blueprint=None,
    *,
    workers=2,
    replicas=2,
    reward_workers=0,
    judges=0,
    observers=None,
    plan=PLAN,
    services=None,
    **ray_options,
):
    """Return a manager of actors that are restarted at once when they die; see `WATCHED` for hanging ones."""
    ray_options = {"backoff_s": 0.05, "heartbeat_s": 0.2, "heartbeat_timeout_s": 120.0} | ray_options
    counts = {"num_workers": workers, "num_replicas": replicas, "reward_workers": reward_workers}
    config = RuntimeConfig(name="ray", **counts, ray=RayConfig(**ray_options))
    judge = JudgeConfig(engine=Choice("scripted"), pool=PoolConfig(num_replicas=judges)) if judges else None
    dispatcher, placement = observers or Observers(), plan_runtime_placement(config, judge=judge)
    runtime = RayRuntime(
        blueprint or ScriptedBlueprint(), config, dispatcher, placement, services=services or DriverServices()
    )
    return RolloutManager(runtime, plan, dispatcher)


def make_tasks(count, prefix="task"):
    """Return tasks with uids such as `task0`; a prefix may ask for a fault, see `ray_blueprint`."""
    message = {"role": "user", "content": "x"}
    return [Task(messages=(message,), uid=f"{prefix}{i}", sample_index=i) for i in range(count)]


def ids_by_task(results):
    """Return the token ids of each episode, by its task's uid."""
    return {result.task.uid: result.trajectories[0].input_ids.tolist() for result in results}


def check_complete(results, tasks):
    """Check that every task has exactly one result, whose records hold, and that finished ones have all four turns."""
    assert Counter(result.task.uid for result in results) == Counter(task.uid for task in tasks)
    for result in results:
        for trajectory in result.trajectories:
            check_trajectory(trajectory)
        if result.status in FINISHED:
            assert len(result.trajectories[0].turns()) == 4


def pids(slots):
    """Return the process ids of the actors that run in some slots."""
    import ray

    found = []
    for slot in slots:
        if slot.handle is not None:
            try:
                found.append(int(ray.get(slot.handle.stats.remote())["pid"]))
            except ray.exceptions.RayActorError:  # it has just died, and the supervisor does not know yet
                continue
    return found


def locate_workers(manager):
    """Return the node of each worker of a run that is alive, in the order of the workers."""
    import ray

    name = f"turnwise-{manager.runtime.cluster.run_name}-worker-"
    actors = ray._private.state.actors().values()  # the public list of actors needs the dashboard
    found = [each for each in actors if each["Name"].startswith(name) and each["State"] == "ALIVE"]
    return [each["Address"]["NodeID"] for each in sorted(found, key=lambda each: each["Name"])]


def wait_until(condition, message, timeout_s=240):
    """Wait until a condition holds; fail if it does not in time with a message, or a function that returns it."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, message() if callable(message) else message
        time.sleep(0.05)


def wait_for_replacement(slots, victim):
    """Wait until every slot has a running actor and none is the victim; return the process ids."""
    wait_until(lambda: len(pids(slots)) == len(slots) and victim not in pids(slots), f"{victim} was not replaced")
    return pids(slots)


def rollout_held(manager, tasks, disturb, folder=None):
    """
    Run tasks, and call `disturb` while requests of all of them are at `HeldEngine`s and cannot end.

    Args:
        manager: its blueprint's engines, or those of its judge, wait.
        tasks: each has one request at a time.
        disturb: is called without arguments.
        folder: of the engines; None for that of the blueprint.
    """
    folder = Path(folder or manager.runtime.blueprint.folder)
    for note in folder.glob("held-*"):  # of an earlier call
        note.unlink()
    hold = folder / "hold"
    hold.touch()
    finished = manager.iterate(tasks)
    wait_until(lambda: len(list(folder.glob("held-*"))) == len(tasks), "not all tasks have a request that waits")
    disturb()
    hold.unlink()
    return list(finished)


def kill_busy(slot, sent=signal.SIGKILL):
    """Send a signal to a replica that runs requests now; return its process id."""
    import ray

    (victim,) = pids([slot])
    wait_until(lambda: ray.get(slot.handle.ping.remote()).num_requests > 0, f"{slot.name} has no request")
    os.kill(victim, sent)
    return victim


class EpisodeOrder(Observer):
    """
    The order of starts and ends of episodes in the driver.

    Attributes:
        longest_chain: most episodes of which each started after the one before it had ended.
    """

    def __init__(self):
        self.longest_chain = 0
        self._depths = {}

    def on_episode_started(self, event):
        self._depths[event.uid] = self.longest_chain + 1

    def on_episode_finished(self, event):
        self.longest_chain = max(self.longest_chain, self._depths.get(event.uid, 0))


def rollout_disturbed(manager, tasks, disturb):
    """Run tasks, and call `disturb` at the first result, while most episodes are in flight."""
    finished = manager.iterate(tasks)
    results = [next(finished)]
    disturb()
    return [*results, *finished]
