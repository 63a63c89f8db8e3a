"""
One simulated run: a scenario with random content, run politely and then disturbed, and compared.

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
    Content of a simulated run. It is built from `random.Random(seed)` and draws its content at once.

    `run` is called in the first thread of a simulation. It may start threads and event loops.
    """

    def run(self, faults: random.Random | None) -> object:
        """
        Run once and return the outcome. Invariants of the run are checked here, by `AssertionError`.

        Args:
            faults: draws faults and their moments; None for the undisturbed run.
        """

    def compare(self, undisturbed: object, disturbed: object) -> None:
        """Raise `AssertionError` if the outcomes differ where they must not."""


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
    """Run a scenario with a seed, and report how it went; nothing that the run raises passes."""
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
