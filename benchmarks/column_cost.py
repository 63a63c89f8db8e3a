"""
Measures what a turn costs when a plugin declares an open column that neither the engine nor a scorer fills.

    python benchmarks/column_cost.py [--runs 7] [--episodes 32]

Calls of functions, in Python and in C, are counted in the process, so their numbers do not depend on the load of the
machine. CPU seconds are of alternating runs without a column and with one.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from contextlib import ExitStack
from typing import Any

from attrs import define, evolve
from measurement import describe_machine, format_spread
from turn_cost import CACHE, PLAN, OracleEngine, build_components, check_result
from workload import Oracle, load_tokenizer, schemas, uniform

from turnwise.record.column_specs import ColumnSpec
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager

TURNS = 8
COLUMN = ColumnSpec(name="routed_experts", dtype="uint8", shape=(48, 8), tokens="all")
DECLARED = {"no open column": {}, "one unused open column": {COLUMN.name: COLUMN}}


@define
class CallCounter:
    """Counts the calls of functions in all threads that start while it is the profile of threads."""

    counts: bool = False
    num_calls: int = 0

    def __call__(self, _frame: Any, event: str, _argument: object) -> None:
        """Count an event of the interpreter, if it is a call."""
        if self.counts and event in ("call", "c_call"):
            self.num_calls += 1


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="measured runs (default: %(default)s)")
    parser.add_argument("--episodes", type=int, default=32, help="episodes per run (default: %(default)s)")
    arguments = parser.parse_args()
    workload = uniform(arguments.episodes, turns=TURNS)
    tokenizer = load_tokenizer(CACHE)
    oracle, tasks = Oracle.of(workload, tokenizer), workload.tasks()

    def build_manager(columns: dict[str, ColumnSpec]) -> RolloutManager:
        engine = OracleEngine(oracle, workload.seconds_per_token)
        components = build_components(workload, engine, tokenizer, schemas(1), 400 * TURNS)
        return RolloutManager(LocalRuntime(engine, evolve(components, columns=columns)), PLAN)

    def run(manager: RolloutManager) -> None:
        for result in manager.rollout(tasks):
            check_result(result, oracle.script)

    def count_calls(counter: CallCounter, manager: RolloutManager) -> int:
        counter.num_calls, counter.counts = 0, True
        run(manager)
        counter.counts = False
        return counter.num_calls

    print(describe_machine())
    calls: dict[str, float] = {}
    for name, columns in DECLARED.items():
        counter = CallCounter()
        threading.setprofile(counter)
        with build_manager(columns) as manager:
            run(manager)  # a warm-up: prompts and tokens are read for the first time
            counts = [count_calls(counter, manager) for _ in range(3)]
        threading.setprofile(None)  # type: ignore[arg-type]  # typeshed does not know that None removes it
        calls[name] = min(counts) / workload.num_turns  # the event loop may wake up more often
    milliseconds: dict[str, list[float]] = {name: [] for name in DECLARED}
    with ExitStack() as stack:
        managers = {name: stack.enter_context(build_manager(columns)) for name, columns in DECLARED.items()}
        for index in range(arguments.runs + 1):
            for name, manager in managers.items():
                started = time.process_time()
                run(manager)
                milliseconds[name] += [1e3 * (time.process_time() - started) / workload.num_turns] if index else []
    first, second = milliseconds.values()
    ratio = statistics.median(b / a for a, b in zip(first, second, strict=True))
    print(f"{'':24s} {'calls per turn':>15s}  CPU milliseconds per turn, median (min-max) of {arguments.runs} runs")
    for name in DECLARED:
        print(f"{name:24s} {calls[name]:15.2f}  {format_spread(milliseconds[name])}")
    print(f"ratio of the CPU times of neighbours: {ratio:.3f}")


if __name__ == "__main__":
    main()
