"""Simulated sessions of the gateway keep their promises under random orders of events, delays and faults."""

from pathlib import Path

import pytest

from turnwise_testing.simulation.pool import simulate

pytestmark = pytest.mark.usefixtures("starts_a_process")

SCENARIO = f"{Path(__file__).with_name('simulated_sessions.py')}:Sessions"


def run(seeds):
    tally = simulate(SCENARIO, seeds, 2, max_failures=3)
    assert [] == [f"{failure.seed}: {failure.error}" for failure in tally.failures]
    assert len(seeds) == tally.passed


@pytest.mark.slow
def test_sessions_under_random_orders():
    """Turns are trained once if a client read them, scores lie on their turns, samples differ, and no episode hangs."""
    run(range(10))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [52, 68, 103])
def test_every_episode_ends(seed):
    """An attempt ends also when its score meets the end of its lease, or when its end meets the start of a call."""
    run(range(seed, seed + 1))


@pytest.mark.many_cases(1)
def test_late_response_of_an_older_lease():
    """An agent reads the response with its dead lease after another agent got the next one."""
    run(range(1510673181, 1510673182))


@pytest.mark.slow
def test_sessions_under_many_random_orders():
    """The same for hundreds of other orders."""
    run(range(1000, 1400))
