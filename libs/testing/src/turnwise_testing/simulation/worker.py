"""Runs seeds of scenarios in this process and prints a JSON line for each; `pool` starts the process."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from turnwise_testing.simulation.scenario import Scenario, SeedReport, run_seed

SCENARIOS: Final = {
    "rollouts": "turnwise_testing.simulation.rollouts:Rollouts",
    "replicas": "turnwise_testing.simulation.replicas:Replicas",
}
"""The scenarios of the core, by name."""
_HANG_CPU_S: Final = float(os.environ.get("TURNWISE_SIMULATION_HANG_CPU_S", "60"))
"""Processor seconds after which a seed counts as hanging; its process reports all stacks and ends."""
_HANG_S: Final = 600.0
"""The same in real seconds, for a seed that takes no processor time."""
HUNG: Final = 75
"""Exit code of a process whose seed hung; it has reported the seed."""
_MAX_LINES: Final = 60
_SEEDS_PER_LINE: Final = 20
"""Passing seeds of a line: a line for each would cost more than some runs. `TURNWISE_SIMULATION_LINES` changes it."""


def load_scenario(name: str) -> Callable[[random.Random], Scenario]:
    """
    Return the class of a scenario.

    Args:
        name: one of `SCENARIOS`, `module:Class`, `path/to/file.py:Class`, or `agent:NAME` with a registered agent and
            perhaps `:CONFIG`, the file of a run's config with its options.
    """
    if name.startswith("agent:"):
        from turnwise_testing.simulation.own_agent import AgentRollouts

        _, agent, *config = name.split(":", 2)
        return partial(AgentRollouts, name=agent, config=config[0] if config else None)
    module, _, attribute = SCENARIOS.get(name, name).rpartition(":")
    if module.endswith(".py"):
        file = Path(module).resolve()
        sys.path.insert(0, str(file.parent))  # as pytest does, so that a scenario finds the modules beside it
        module = file.stem
    made: Callable[[random.Random], Scenario] = getattr(importlib.import_module(module), attribute)
    return made


def main(arguments: list[str]) -> int:
    """Run `SCENARIO FIRST COUNT STRIDE`; print a line for each failure, and a line for 20 passing seeds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario")
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("stride", type=int)
    parser.add_argument("--core", type=int, default=None, help="run on one core alone, chosen by this number")
    options = parser.parse_args(arguments)
    if options.core is not None and sys.platform == "linux":
        # A hand-over between threads takes half of the time when both run on one core.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[options.core % len(cores)]})
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    # A failing simulation leaves coroutines and tasks behind, whose warnings would hide its error.
    warnings.simplefilter("ignore", ResourceWarning)
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
    make = load_scenario(options.scenario)
    passed, started = 0, time.process_time()
    each_line = int(os.environ.get("TURNWISE_SIMULATION_LINES", _SEEDS_PER_LINE))
    for number in range(options.count):
        seed = options.first + number * options.stride
        with _watched(seed, passed, started):
            report = run_seed(make, seed)
        passed += report.failure is None
        if report.failure is not None or passed >= each_line:
            _print(report, passed, started)
        else:
            continue
        passed, started = 0, time.process_time()
    _print(None, passed, started)
    return 0


def _print(report: SeedReport | None, passed: int, started: float) -> None:
    line: dict[str, object] = {"passed": passed, "cpu_s": time.process_time() - started}
    if report is not None:
        line |= {"seed": report.seed, "digest": report.digest}
        if report.failure is not None:
            line["error"] = "\n".join(_lines_of(report.failure)[-_MAX_LINES:])
    print(json.dumps(line), flush=True)  # noqa: T201 - the parent process reads it


@contextmanager
def _watched(seed: int, passed: int, started: float) -> Iterator[None]:
    """Report a seed that neither ends nor waits: the scheduler cannot stop code that never gives its turn away."""
    ended, cpu_s = threading.Event(), time.process_time()

    def watch() -> None:
        end_s = time.monotonic() + _HANG_S
        while not ended.wait(1.0):
            if time.process_time() - cpu_s > _HANG_CPU_S or time.monotonic() > end_s:
                _report_hang(seed, passed, started)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _report_hang(seed: int, passed: int, started: float) -> None:
    stacks = "".join(
        f"a thread of the process:\n{''.join(traceback.format_stack(frame)[-8:])}"
        for frame in sys._current_frames().values()  # noqa: SLF001 - the only way to other threads' stacks
    )
    _print(SeedReport(seed=seed, failure=TimeoutError(f"the seed hangs\n{stacks}")), passed, started)
    os._exit(HUNG)


def _lines_of(failure: BaseException) -> list[str]:
    return [line for entry in traceback.format_exception(failure) for line in entry.splitlines()]
