"""
Runs one seed: a scenario with random content in the polite order and in a random one, and compares the outcomes.

A scenario draws its content from a seed. It runs twice: in the polite order without faults, and in a random order with
delays and faults. Wherever order must not matter, both must have the same outcome.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol, TypeVar

from attrs import frozen

from turnwise.threads import _THREADS
from turnwise_testing.simulation.patches import seeded_random
from turnwise_testing.simulation.scheduler import POLITE, Disturbance, Scheduler

T = TypeVar("T")


class Scenario(Protocol):
    """
    The content of a simulated run. Its constructor gets a random generator, and draws the content from it.

    `run` is called in the first thread of a simulation. It may start threads and event loops.
    """

    def run(self, faults: random.Random | None) -> object:
        """
        Run once, and return the outcome. Raise `AssertionError` for a broken invariant of the run.

        Args:
            faults: draws faults and their moments; None for the undisturbed run.
        """

    def compare(self, undisturbed: object, disturbed: object) -> None:
        """Raise `AssertionError` if the outcomes differ in a part that the order of events must not change."""


@frozen(kw_only=True)
class SeedReport:
    """
    The run of one seed.

    Attributes:
        seed: of the run.
        failure: the error that failed it, if any.
        num_steps: steps of threads and event loops.
        digest: of all random choices of the order; equal for each run of the seed.
    """

    seed: int
    failure: BaseException | None = None
    num_steps: int = 0
    digest: int = 0


def run_seed(make: Callable[[random.Random], Scenario], seed: int) -> SeedReport:
    """Run a scenario with a seed, and return its report; an error of the run is the report's failure."""
    rng = random.Random(seed)
    disturbance = Disturbance.draw(rng)
    scenario = make(random.Random(rng.random()))
    scheduler = Scheduler(seed, disturbance)
    failure: BaseException | None = None
    try:
        undisturbed = _run(Scheduler(seed, POLITE), seed, lambda: scenario.run(None))
        faults = random.Random(rng.random())
        disturbed = _run(scheduler, seed, lambda: scenario.run(faults))
        scenario.compare(undisturbed, disturbed)
    except Exception as error:  # noqa: BLE001 - reported with the seed
        failure = error
    return SeedReport(seed=seed, failure=failure, num_steps=scheduler.num_steps, digest=scheduler.digest)


def _run(scheduler: Scheduler, seed: int, function: Callable[[], T]) -> T:
    outcome: list[T] = []
    # The threads of an earlier simulation have ended, but the core's pool would still give them jobs.
    _THREADS._idle.clear()  # noqa: SLF001
    with seeded_random(seed):
        scheduler.run(lambda: outcome.append(function()))
    return outcome[0]
