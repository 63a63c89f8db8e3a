"""Prints the progress and the failures of simulations, for `turnwise check --simulate`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.text import Text

from turnwise.console import Console
from turnwise.errors import ConfigError
from turnwise_testing.simulation.pool import Tally, simulate
from turnwise_testing.simulation.worker import SCENARIOS

_EVERY_S: Final = 10.0
"""Seconds between two lines of progress."""
_SHOWN: Final = 3
"""Failures of a scenario that are printed with their error; of the others, only the command is."""


def simulate_all(names: Sequence[str], seeds: range, num_processes: int) -> int:
    """
    Run scenarios; print a line for each scenario, and a command that repeats each failing seed.

    Args:
        names: of the scenarios; none runs all of `SCENARIOS`.
        seeds: of each scenario.
        num_processes: that run at the same time.

    Returns:
        The number of failing seeds.

    Raises:
        ConfigError: a scenario is unknown.
    """
    chosen = tuple(names) or tuple(SCENARIOS)
    for name in chosen:
        _check_name(name)
    console = Console(soft_wrap=True)
    return sum(_run(console, name, seeds, num_processes) for name in chosen)


def _check_name(name: str) -> None:
    place = name.rpartition(":")[0]
    if name in SCENARIOS or name.startswith("agent:"):
        return
    if not place:
        known = ", ".join(SCENARIOS)
        raise ConfigError(f"no scenario {name!r}; expected one of {known}, agent:NAME, FILE.py:CLASS or MODULE:CLASS")
    if place.endswith(".py") and not Path(place).is_file():
        raise ConfigError(f"no scenario {name!r}: there is no file {place}")


def _run(console: Console, name: str, seeds: range, num_processes: int) -> int:
    started = shown_at = time.perf_counter()

    def show(tally: Tally) -> None:
        nonlocal shown_at
        if time.perf_counter() - shown_at > _EVERY_S:
            shown_at = time.perf_counter()
            done = tally.passed + len(tally.failures)
            console.print(
                f"        {name}: {done} of {len(seeds)} seeds, {len(tally.failures)} failed", highlight=False
            )

    tally = simulate(name, seeds, num_processes, show)
    rate = len(seeds) / (time.perf_counter() - started)
    verdict = Text("failed ", "bold red") if tally.failures else Text("passed ", "green")
    num_failed = f"{len(tally.failures)} failed, " if tally.failures else ""
    console.print(
        verdict, f"{name}: {len(seeds)} seeds from {seeds.start}, {num_failed}{rate:.1f} seeds/s", highlight=False
    )
    for number, failure in enumerate(tally.failures):
        if number < _SHOWN:
            console.print(failure.error, highlight=False)
        console.print(f"repeat it: turnwise check {failure.replay}", highlight=False)
    return len(tally.failures)
