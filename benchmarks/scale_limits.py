"""
Predicts which part of a run on Ray limits it, from the measured costs of its parts, for several sizes.

    python benchmarks/scale_limits.py
    python benchmarks/scale_limits.py --sizes 16x16,100x100,1000x1000 --episodes agent
    python benchmarks/scale_limits.py --sizes 10000x1000 --episodes long --in-flight 64 --cells 50
    python benchmarks/scale_limits.py --sizes 100x1000 --node-dies 8 --json

The driver, the workers, the replicas and the messages between them are simulated. Each process takes the CPU seconds
that `scale_cost.py` measured for its work, and engines are the replicas of `turnwise bench routing`.
docs/explanation/scale.md compares the model with real runs and has the results.

Columns of the tables:

    ends/s            episodes that the driver delivered
    hits              context tokens that a prefix cache held, relative to all context tokens sent
    /msg              requests in a worker's message
    driver, worker, replica, engine
                      use of the driver's event loop, of the workers' and the replicas' on average, and running requests
                      relative to the most that engines run
    limit             the busiest part, if it is used to 90 %
    GCS start, driver start
                      CPU seconds until every worker knows every replica: of the head node's control process for all
                      cells, and of a cell's driver
    pings, view       use of the driver by pings, and a look of a router at all replicas
    death             CPU seconds of driver and GCS after the death of a replica
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from attrs import asdict, evolve, frozen
from rich import box
from rich.table import Table
from scale_model.costs import Costs, load_costs
from scale_model.result import FixedCosts, ScaleResult, as_plain, simulate
from scale_model.run import Death, Run

from turnwise.console import Console
from turnwise.errors import ConfigError
from turnwise_routing_bench.simulator import ReplicaModel
from turnwise_routing_bench.traces import TraceTrajectory, TraceTurn

_SIMULATED: Final = 12_000
"""Episodes in flight in the simulated share of a large run, at most, if it can be folded so far."""
_SMALLEST_SHARE: Final = 4
"""Replicas of the simulated share, at least."""


@frozen(kw_only=True)
class Kind:
    """
    A kind of episode.

    Attributes:
        num_prompt_tokens: length of the prompt.
        num_turns: turns of an episode, within 25 %.
        num_new_tokens: sampled tokens of a turn, within 25 %.
        num_observation_tokens: tokens of a tool's answer.
        tool_s: median seconds of a tool, log-normal with a sigma of 1, at most 60 times as long.
        max_running: requests that an engine runs at once: its cache of 400,000 tokens over half of the longest context.
    """

    num_prompt_tokens: int
    num_turns: int
    num_new_tokens: int
    num_observation_tokens: int
    tool_s: float
    max_running: int

    @property
    def num_tokens(self) -> int:
        """Tokens of an average episode at its end."""
        turn = self.num_new_tokens + self.num_observation_tokens
        return self.num_prompt_tokens + self.num_turns * turn - self.num_observation_tokens

    def draw(self, rng: random.Random, number: int) -> TraceTrajectory:
        """Return the episode of a number."""
        count = max(1, round(self.num_turns * rng.uniform(0.75, 1.25)))
        lengths = [max(1, round(self.num_new_tokens * rng.uniform(0.75, 1.25))) for _ in range(count)]
        turns = [
            TraceTurn(
                num_new_tokens=length,
                tool_s=self.tool_s * min(60.0, math.exp(rng.gauss(0, 1))),
                num_observation_tokens=self.num_observation_tokens,
            )
            for length in lengths[:-1]
        ]
        last = TraceTurn(num_new_tokens=lengths[-1])
        return TraceTrajectory(
            trajectory_id=str(number), num_prompt_tokens=self.num_prompt_tokens, turns=(*turns, last)
        )


KINDS: Final[Mapping[str, Kind]] = {
    "short": Kind(
        num_prompt_tokens=500, num_turns=4, num_new_tokens=200, num_observation_tokens=50, tool_s=0.5, max_running=256
    ),
    "agent": Kind(
        num_prompt_tokens=2000,
        num_turns=16,
        num_new_tokens=500,
        num_observation_tokens=1400,
        tool_s=2.0,
        max_running=24,
    ),
    "long": Kind(
        num_prompt_tokens=8000,
        num_turns=32,
        num_new_tokens=1000,
        num_observation_tokens=2800,
        tool_s=5.0,
        max_running=6,
    ),
}
"""Kinds of episodes by name: 1,450, 32,000 and 127,000 tokens."""


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes",
        default="8x8,100x100,100x1000,1000x1000,10000x1000",
        metavar="WxR,...",
        help="numbers of workers and replicas (8x8,100x100,100x1000,1000x1000,10000x1000)",
    )
    parser.add_argument("--episodes", choices=[*KINDS], default="agent", help="kind of episodes (agent)")
    parser.add_argument(
        "--in-flight", type=int, metavar="N", help="episodes of a worker at once (as many as the engines run)"
    )
    parser.add_argument("--cells", type=int, default=1, metavar="N", help="separate runs that share the processes (1)")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="measured seconds of model time (60)")
    parser.add_argument("--warm-up", type=float, default=30.0, metavar="S", help="seconds before them (30)")
    parser.add_argument(
        "--node-dies", type=int, default=0, metavar="N", help="so many replicas die together after the warm-up (0)"
    )
    parser.add_argument("--costs", type=Path, metavar="FILE", help="measured costs, of benchmarks/scale_cost.py")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the episodes (0)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Simulate every size and print the tables."""
    arguments = parse_arguments(words)
    sizes, measured = parse_sizes(arguments.sizes), load_costs(arguments.costs)
    rows = [predict(size, arguments, measured.costs) for size in sizes]
    if arguments.json:
        options = {name: getattr(arguments, name) for name in ("episodes", "cells", "seconds", "warm_up", "seed")}
        document = {"machine": measured.machine, **options, "results": rows}
        print(json.dumps(document, indent=2))
        return
    console = Console(width=max(100, Console().width))
    console.print(f"costs of: {measured.machine}", style="dim", highlight=False)
    for table in (_use_table(rows), _fixed_table(rows)):
        console.print(table)


def parse_sizes(text: str) -> list[tuple[int, int]]:
    """
    Return numbers of workers and replicas.

    Raises:
        ConfigError: the text is no list of them.
    """
    sizes = []
    for part in text.split(","):
        workers, _, replicas = part.strip().partition("x")
        if not (workers.isascii() and workers.isdigit() and replicas.isascii() and replicas.isdigit()):
            raise ConfigError(f"--sizes: expected workers and replicas such as 16x8, got {part!r}")
        if not (int(workers) and int(replicas)):
            raise ConfigError(f"--sizes: expected at least one worker and one replica, got {part!r}")
        sizes.append((int(workers), int(replicas)))
    return sizes


def predict(size: tuple[int, int], arguments: argparse.Namespace, costs: Costs) -> dict[str, Any]:
    """
    Return a JSON object with the measurements of one size.

    Raises:
        ConfigError: an option does not fit the size.
    """
    workers, replicas = size
    kind, cells = KINDS[arguments.episodes], arguments.cells
    if cells < 1 or workers % cells or replicas % cells:
        raise ConfigError(f"--cells: {workers} workers and {replicas} replicas cannot be shared by {cells} runs")
    if not (arguments.seconds > 0 and arguments.warm_up >= 0):
        raise ConfigError("--seconds and --warm-up: expected a time, and at least 0")
    in_flight = arguments.in_flight or max(1, kind.max_running * replicas // workers)
    if in_flight < 1:
        raise ConfigError(f"--in-flight: expected at least 1, got {in_flight}")
    cell = workers // cells, replicas // cells
    fold = choose_fold(*cell, in_flight)
    planned = Run(
        num_workers=cell[0],
        num_replicas=cell[1],
        make_episode=kind.draw,
        max_in_flight=in_flight,
        window=2 * in_flight,
        engine=ReplicaModel(max_in_flight=kind.max_running),
        fold=fold,
        until_s=arguments.seconds + arguments.warm_up,
        warm_up_s=arguments.warm_up,
        stagger=True,
        seed=arguments.seed,
    )
    if arguments.node_dies:
        planned = evolve(planned, deaths=_deaths(planned, arguments.node_dies))
    result = simulate(planned, costs)
    fixed = FixedCosts.of(planned, costs)
    head = {"workers": workers, "replicas": replicas, "in_flight": workers * in_flight, "cells": cells, "fold": fold}
    return {**head, **_of_all_cells(result, cells), "fixed_of_a_cell": asdict(fixed)}


def choose_fold(workers: int, replicas: int, in_flight: int) -> int:
    """Return the number of equal shares of a run that makes one of them small enough to simulate."""
    folds = [n for n in range(1, replicas + 1) if workers % n == 0 == replicas % n and replicas // n >= _SMALLEST_SHARE]
    return next((n for n in folds if workers * in_flight // n <= _SIMULATED), max(folds, default=1))


def _deaths(planned: Run, count: int) -> tuple[Death, ...]:
    if count >= planned.num_replicas // planned.fold:
        raise ConfigError(
            f"--node-dies: {count} of {planned.num_replicas // planned.fold} simulated replicas cannot die"
        )
    # A machine that fails says nothing: its pings stop, and Ray's own health check takes about as long.
    death = partial(Death, at_s=planned.warm_up_s, kind="replica", detect_s=30.0, restart_s=60.0)
    return tuple(death(index=index) for index in range(count))


def _of_all_cells(result: ScaleResult, cells: int) -> dict[str, object]:
    sums = ("turns", "episodes", "turns_per_s", "episodes_per_s", "mean_in_flight")
    plain = as_plain(result)
    return {**plain, **{name: getattr(result, name) * cells for name in sums}}


def _use_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="while episodes run", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    for name in ("size", "in flight", "turns/s", "ends/s", "hits", "/msg", "driver", "worker", "replica", "engine"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("limit")
    for row in rows:
        table.add_row(
            f"{row['workers']}x{row['replicas']}",
            f"{row['in_flight']:,}",
            f"{row['turns_per_s']:,.0f}",
            f"{row['episodes_per_s']:,.1f}",
            f"{row['prefix_hit_rate']:.0%}",
            f"{row['turns_per_message']:.1f}",
            *(f"{row[name]:.0%}" for name in ("driver", "worker", "replica", "engine")),
            str(row["bottleneck"]),
        )
    return table


def _fixed_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        title="fixed costs in CPU: of a cell, and of the head node for all cells",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
    )
    for name in ("size", "cells", "GCS start", "driver start", "worker", "replica", "pings", "view", "death"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        fixed = row["fixed_of_a_cell"]
        table.add_row(
            f"{row['workers']}x{row['replicas']}",
            str(row["cells"]),
            _duration(fixed["start_gcs_s"] * row["cells"]),
            *(_duration(fixed[f"start_{part}_s"]) for part in ("driver", "worker", "replica")),
            f"{fixed['pings']:.0%}",
            _duration(fixed["view_turn_s"]),
            _duration(fixed["death_driver_s"] + fixed["death_gcs_s"]),
        )
    return table


def _duration(seconds: float) -> str:
    for size, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e6:.1f} us"


if __name__ == "__main__":
    main()
