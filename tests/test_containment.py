"""A plugin that raises anything, anywhere, or swallows its cancellation costs its own episode and no other."""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
from ray_runs import make_manager
from sabotage_blueprint import EXCEPTIONS, SWALLOWS, SabotageBlueprint, uid_of

from turnwise import Status, Task
from turnwise.episode.setup import Limits
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan

NUM_GOOD = 4
WATCHDOG_S = 240
ON_RAY = [pytest.mark.ray, pytest.mark.slow]

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.one_part,
]


class Expected(NamedTuple):
    """Status and owner of a bad episode."""

    status: Status
    owner: str | None = None


COMPLETED = Expected(Status.COMPLETED)
OUTCOMES = {
    "tool.execute": Expected(Status.FAILED, "tool"),
    "tool.create": Expected(Status.FAILED, "tool"),
    "child of a tool": Expected(Status.FAILED, "tool"),
    "background task of a tool": COMPLETED,
    "tool.release": COMPLETED,
    "sync tool": COMPLETED,
    "agent.step": Expected(Status.FAILED, "agent"),
    "child of an agent": Expected(Status.FAILED, "agent"),
    "reward": Expected(Status.FAILED, "reward"),
    "sync reward": Expected(Status.FAILED, "reward"),
    "child of a reward": Expected(Status.FAILED, "reward"),
    "interaction.respond": Expected(Status.FAILED, "agent"),
    "interaction.release": COMPLETED,
    "engine.generate": Expected(Status.FAILED, "engine"),
    "engine.abort": Expected(Status.TIMED_OUT, "engine"),
    "on_turn_finished": COMPLETED,
    "on_episode_finished": COMPLETED,
}
SWALLOWED = {
    "tool.execute": (COMPLETED, 1),
    "tool.create": (COMPLETED, 1),
    "tool.release": (COMPLETED, 1),
    "agent.step": (Expected(Status.TIMED_OUT, "agent"), 1),
    "reward": (Expected(Status.FAILED, "reward"), 1),
    "interaction.respond": (Expected(Status.TIMED_OUT, "agent"), 1),
    "interaction.release": (COMPLETED, 1),
    "engine.generate": (Expected(Status.TIMED_OUT, "engine"), 1),
    "engine.abort": (Expected(Status.TIMED_OUT, "engine"), 0),
}
"""Outcomes of code that ignores its cancellation, and the number of tasks that are left behind."""

READ_BY_THE_MODEL = {"RuntimeError", "CancelledError", "SystemExit"}
"""Exceptions of tools that become their answer, so the episode continues."""


def expected_of(place, kind, runtime):
    """Return the outcome of an exception in a place."""
    # In an actor, no task of the event loop may end with an exit, so a child's becomes a `RuntimeError`.
    is_converted = runtime == "ray" and place == "child of a tool" and kind == "KeyboardInterrupt"
    is_read = OUTCOMES[place].owner == "tool" and (kind in READ_BY_THE_MODEL or is_converted)
    return COMPLETED if is_read else OUTCOMES[place]


def make_tasks(places, kinds):
    """Return a bad task for each place and kind, and some good ones."""
    uids = [uid_of(place, kind) for place in places for kind in kinds]
    uids += [f"good {index}" for index in range(NUM_GOOD)]
    message = {"role": "user", "content": "hi"}
    return [
        Task(messages=(message,), uid=uid, agent_name="sync" if uid.startswith("sync reward|") else "agent")
        for uid in uids
    ]


def rollout(runtime, blueprint, tasks, over, **ray_options):
    """Run the tasks; return the results by uid, and the counters of the runtime. `over` appears before it stops."""
    plan = RolloutPlan(default_agent="agent", agents={"agent": None, "sync": None})
    if runtime == "ray":
        manager = make_manager(blueprint, plan=plan, **ray_options)
    else:
        engine = blueprint.make_engine()
        manager = RolloutManager(LocalRuntime(engine, blueprint.make_components(engine)), plan)
    with manager, ThreadPoolExecutor(1) as waiter:
        try:
            results = waiter.submit(manager.rollout, tasks).result(WATCHDOG_S)
            stats = manager.stats()
        finally:
            over.touch()
    by_uid = {result.task.uid: result for result in results}
    assert by_uid.keys() == {task.uid for task in tasks}
    return by_uid, stats


def restarts(stats):
    """Return the counters of actors that were restarted."""
    return {name: count for name, count in stats.items() if name.endswith("_restarts") and count}


def outcome(result):
    """Return the status of an episode and the owner of its fault."""
    return Expected(result.status, result.fault and result.fault.owner)


def check_good(results):
    """Check that the other episodes are complete and scored."""
    good = [result for uid, result in results.items() if uid.startswith("good")]
    assert [(each.status, each.reward) for each in good] == [(Status.COMPLETED, 1.0)] * NUM_GOOD


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=ON_RAY)])
def runtime(request):
    """Name of a runtime; for Ray, with a connection to the cluster."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return request.param


@pytest.fixture(scope="module")
def matrix(runtime, tmp_path_factory):
    """Results and counters of one run in which every exception is raised in every place."""
    over = tmp_path_factory.mktemp(runtime) / "over"
    # Only requests that hang may meet it, and all of them do at the same time. On Ray a request is a message between
    # processes that other work on the machine delays.
    limits = Limits(turn_s=5.0 if runtime == "local" else 30.0, abort_grace_s=0.1)
    return rollout(runtime, SabotageBlueprint(str(over), limits), make_tasks(OUTCOMES, EXCEPTIONS), over)


@pytest.mark.many_cases
@pytest.mark.parametrize("kind", EXCEPTIONS)
@pytest.mark.parametrize("place", OUTCOMES)
def test_an_exception_costs_its_own_episode(matrix, runtime, place, kind):
    """Whatever a plugin raises, the episode is delivered, and the fault names the owner of the code."""
    assert outcome(matrix[0][uid_of(place, kind)]) == expected_of(place, kind, runtime)


def test_no_exception_costs_another_episode_or_an_actor(matrix):
    """The other episodes are complete and scored, and no actor was restarted."""
    results, stats = matrix
    check_good(results)
    assert restarts(stats) == {}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("places", [("reward", "child of a reward"), ("sync reward",)], ids=["async", "sync"])
def test_an_exception_in_a_reward_worker_costs_its_own_episode(tmp_path, places):
    """Reward workers report whatever a reward raises, and none is restarted."""
    over, tasks = tmp_path / "over", make_tasks(places, EXCEPTIONS)
    blueprint = SabotageBlueprint(str(over), sync_reward=places == ("sync reward",))

    results, stats = rollout("ray", blueprint, tasks, over, reward_workers=1)

    check_good(results)
    bad = {uid: outcome(result) for uid, result in results.items() if not uid.startswith("good")}
    assert bad == dict.fromkeys(bad, Expected(Status.FAILED, "reward"))
    assert restarts(stats) == {}


@pytest.fixture(scope="module")
def swallowed(runtime, tmp_path_factory):
    """Results and counters of one run in which code of every place ignores its cancellation."""
    over = tmp_path_factory.mktemp(runtime) / "over"
    limits = Limits(tool_call_s=1.0, reward_s=1.0, turn_s=2.0, episode_s=4.0, abort_grace_s=0.1)
    if runtime == "ray":  # messages travel between processes within these
        limits = Limits(tool_call_s=10.0, reward_s=10.0, turn_s=20.0, episode_s=60.0, abort_grace_s=0.1)
    return rollout(runtime, SabotageBlueprint(str(over), limits), make_tasks(SWALLOWED, [SWALLOWS]), over)


@pytest.mark.many_cases(3)
@pytest.mark.parametrize("place", SWALLOWED)
def test_code_that_swallows_its_cancellation_is_left_behind(swallowed, runtime, place):
    """At its deadline the episode continues or ends without the code, counts it, and names its owner."""
    bad = swallowed[0][uid_of(place, SWALLOWS)]
    expected, num_left = SWALLOWED[place]
    if (runtime, place) == ("ray", "engine.generate"):  # the worker waits for a message, which it can stop to do
        num_left = 0
    assert (outcome(bad), bad.metrics.extra.get("left_behind", 0)) == (expected, num_left)


def test_code_that_swallows_its_cancellation_costs_no_other_episode(swallowed):
    """The other episodes are complete and scored, and no actor was restarted."""
    results, stats = swallowed
    check_good(results)
    assert restarts(stats) == {}


def test_a_blocking_reward_delays_no_other_episode(runtime, tmp_path):
    """A sync reward runs in a thread: it fails at `reward_s`, and the others end while it blocks."""
    over, seconds = tmp_path / "over", 0.3 if runtime == "local" else 10.0
    blueprint = SabotageBlueprint(str(over), Limits(reward_s=seconds))

    results, stats = rollout(runtime, blueprint, make_tasks(["sync reward"], [SWALLOWS]), over)

    check_good(results)
    bad = results[uid_of("sync reward", SWALLOWS)]
    assert (bad.status, bad.fault.owner, bad.fault.kind) == (Status.FAILED, "reward", "TimeoutError")
    assert restarts(stats) == {}
