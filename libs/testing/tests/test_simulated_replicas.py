"""Simulated replicas: records stay right under lost links, dying actors, updates, sleep and aborts."""

import pytest

from turnwise_testing.simulation.pool import simulate

pytestmark = pytest.mark.usefixtures("starts_a_process")


def failures_of(seeds):
    """Return the failures of some seeds, with the arguments that repeat them."""
    tally = simulate("replicas", seeds, 1)
    assert len(seeds) == tally.passed + len(tally.failures)
    return [f"{each.replay}\n{each.error}" for each in tally.failures]


def test_long_wait_for_a_replica():
    """Replicas die with six updates in a row; an episode waits 300 s for the seventh."""
    assert [] == failures_of(range(110457488, 110457489))


def test_many_kills():
    """No run kills three workers of an episode, after which the runtime would rightly blame the episode."""
    assert [] == failures_of(range(2110105165, 2110105166))


@pytest.mark.slow
def test_episodes_over_replicas_do_not_depend_on_the_order_of_events():
    """Tokens have the context and the weights that their records claim, and every episode ends once, as undisturbed."""
    assert [] == failures_of(range(30))


@pytest.mark.slow
def test_many_seeds_of_episodes_over_replicas():
    """The same for hundreds of other orders."""
    assert [] == failures_of(range(30, 430))
