"""The simulation itself: a seed repeats a run, polite runs have asyncio's order, and planted faults are found."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise_testing.simulation.pool import simulate
from turnwise_testing.simulation.worker import SCENARIOS

pytestmark = pytest.mark.usefixtures("starts_a_process")

RACES = Path(__file__).parent / "simulated_races.py"


def run_code(code):
    """Run code in a process with simulated locks and clocks, and return the JSON that it prints."""
    install = "from turnwise_testing.simulation.patches import install\ninstall()\n"
    run = subprocess.run(
        [sys.executable, "-c", install + code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "0"},
    )
    return json.loads(run.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenarios_of_the_core_pass(scenario):
    """The core's own runs hold under random orders of events."""
    tally = simulate(scenario, range(25), 1)

    assert [] == [(each.seed, each.error) for each in tally.failures]
    assert tally.passed == 25


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [*SCENARIOS, "agent:tool_agent", "agent:single_turn"])
def test_many_seeds_pass(scenario):
    """Scenarios and shipped agents hold under more orders."""
    tally = simulate(scenario, range(1000, 1300), 2)

    assert [] == [(each.seed, each.error) for each in tally.failures]


@pytest.mark.slow
def test_a_seed_repeats_its_run():
    """Two processes make the same choices in the same order for each seed, also after other seeds."""

    def digests(first):
        command = [sys.executable, "-m", "turnwise_testing.simulation", "rollouts", str(first), str(12 - first), "1"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        return {line["seed"]: line["digest"] for line in map(json.loads, printed.splitlines()) if "seed" in line}

    environment = os.environ | {"PYTHONHASHSEED": "0", "TURNWISE_SIMULATION_LINES": "1"}
    whole, part = digests(0), digests(8)

    assert len(whole) == 12
    assert {seed: whole[seed] for seed in part} == part


@pytest.mark.many_cases(1)
@pytest.mark.parametrize("name", ["LostUpdate", "LostWakeUp", "Deadlock", "AbandonedThread", "CheckThenAct"])
def test_planted_faults_are_found(name):
    """Each kind of race is found by some seed, and the same code without the fault passes all of them."""
    found = simulate(f"{RACES}:{name}", range(300), 1, max_failures=1)
    right = simulate(f"{RACES}:{name}Mended", range(300), 1)

    assert (1, 0) == (len(found.failures), len(right.failures)), [each.error for each in right.failures]


@pytest.mark.slow
def test_a_failure_repeats():
    """The seed of a failure fails again, alone, with the same error."""
    (first,) = simulate(f"{RACES}:LostUpdate", range(300), 1, max_failures=1).failures
    (again,) = simulate(first.scenario, range(first.seed, first.seed + 1), 1).failures

    assert first == again


@pytest.mark.slow
def test_a_seed_that_hangs_is_reported_and_the_others_run(monkeypatch):
    """Nothing stops code that never gives its turn away; its process ends, and another one runs the rest."""
    monkeypatch.setenv("TURNWISE_SIMULATION_HANG_CPU_S", "1")

    tally = simulate(f"{RACES}:Spin", range(4), 1)

    assert (3, [1]) == (tally.passed, [each.seed for each in tally.failures])
    assert "the seed hangs" in tally.failures[0].error
    assert "simulated_races.py" in tally.failures[0].error


ORDER = """
import asyncio, json
from turnwise_testing.simulation.scheduler import Scheduler
from turnwise_testing.simulation.virtual_loop import VirtualLoop
order = []

async def work(name, seconds):
    order.append(name)
    await asyncio.sleep(seconds)
    order.append(name.upper())
    await asyncio.sleep(0)
    order.append(name + "!")

async def main():
    async with asyncio.TaskGroup() as group:
        for name, seconds in (("a", 0.02), ("b", 0.01), ("c", 0), ("d", 0.01)):
            group.create_task(work(name, seconds))
"""


def test_polite_runs_have_the_order_of_asyncio():
    """Without a disturbance, tasks and timers continue as on asyncio's loop with a clock that no machine delays."""
    simulated = run_code(ORDER + "Scheduler(0).run(lambda: asyncio.run(main()))\nprint(json.dumps(order))")
    real = run_code(ORDER + "asyncio.Runner(loop_factory=VirtualLoop).run(main())\nprint(json.dumps(order))")

    assert real == simulated


def test_waiting_costs_no_time():
    """An hour of sleeps, timeouts and timers passes on the virtual clock."""
    code = """
import asyncio, json, threading, time, queue
from turnwise_testing.simulation.scheduler import Scheduler
seen = []

async def sleep():
    await asyncio.sleep(600)
    seen.append(asyncio.get_running_loop().time())

def main():
    start = time.monotonic()
    time.sleep(600)
    assert not threading.Event().wait(600)
    try:
        queue.SimpleQueue().get(timeout=600)
    except queue.Empty:
        pass
    thread = threading.Thread(target=time.sleep, args=(600,))
    thread.start()
    thread.join()
    asyncio.run(sleep())
    seen.append(time.monotonic() - start)

Scheduler(0).run(main)
print(json.dumps(seen[-1]))
"""
    assert 3000.0 == run_code(code)


def test_names_are_checked():
    """An unknown scenario is refused by name."""
    run = subprocess.run(
        [sys.executable, "-m", "turnwise.cli", "check", "--simulate", "rolouts"], capture_output=True, text=True
    )

    assert run.returncode == 2
    assert "no scenario 'rolouts'; expected one of rollouts" in run.stderr


def test_other_threads_have_asyncios_loop():
    """Installed patches change nothing outside of simulated threads."""
    code = """
import asyncio, json, threading
async def main():
    return await asyncio.to_thread(lambda: 41) + 1
print(json.dumps([asyncio.run(main()), type(asyncio.new_event_loop()).__name__]))
"""
    loop = asyncio.new_event_loop()
    loop.close()

    assert [42, type(loop).__name__] == run_code(code)
