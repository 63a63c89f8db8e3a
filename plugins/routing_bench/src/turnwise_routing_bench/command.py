"""`turnwise bench routing`: routers compared on synthetic and recorded traces, in a simulator."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import asdict
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnwise.cli.exit_codes import OK
from turnwise.cli.recorded_traces import load_trace
from turnwise.cli.synthetic_traces import synthetic_traces
from turnwise.errors import ConfigError
from turnwise.host import load
from turnwise.protocols import Resources, Router
from turnwise.registry import Entry, did_you_mean
from turnwise.routing_simulator import RoutingResult, Trace, simulate
from turnwise.types import PluginRecipe

MakeRouter = Callable[[], Router]


class BenchCommand:
    """Measure parts of turnwise that need no model."""

    help = "compare routers on synthetic or recorded traces, in a simulator"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare `routing [--trace FILE ...] [--replicas N] [--routers a,b] [--seed N] [--json]`."""
        parser.epilog = (
            "Examples:\n  turnwise bench routing\n"
            "  turnwise bench routing --replicas 8 --routers least_tokens,round_robin --seed 1\n"
            "  turnwise bench routing --trace runs/first/trajectories.parquet --replicas 8\n"
            "  turnwise bench routing --trace monday.jsonl --json"
        )
        subjects = parser.add_subparsers(metavar="SUBJECT", required=True)
        routing = subjects.add_parser("routing", help="makespan, prefix hits, balance and moves of each router")
        routing.add_argument(
            "--trace",
            metavar="FILE",
            nargs="+",
            default=[],
            help="instead of the synthetic traces: results of rollouts, Parquet, or traces, JSONL",
        )
        routing.add_argument("--replicas", type=int, default=4, metavar="N", help="how many replicas (4)")
        routing.add_argument("--routers", default="", metavar="a,b", help="which routers; all when left out")
        routing.add_argument("--seed", type=int, default=0, metavar="N", help="of the synthetic traces (0)")
        routing.add_argument("--json", action="store_true", help="print JSON instead of a table")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the comparison."""
        if arguments.replicas < 1:
            raise ConfigError(f"--replicas: {arguments.replicas} is not at least 1")
        routers = find_routers(arguments.routers)
        traces = [load_trace(path) for path in arguments.trace] or synthetic_traces(arguments.seed, arguments.replicas)
        rows = compare(traces, routers, arguments.replicas)
        if arguments.json:
            head = {"replicas": arguments.replicas, "seed": None if arguments.trace else arguments.seed}
            sys.stdout.write(json.dumps({**head, "results": rows}, indent=2) + "\n")
        else:
            Console().print(_table(rows))
        return OK


def find_routers(names: str) -> Mapping[str, MakeRouter]:
    """
    Return what makes each named router with its default options; all that are registered for an empty text.

    Raises:
        ConfigError: a name is unknown or twice there, or its router has options without defaults.
    """
    known = load(PluginRecipe()).routers.entries()
    chosen = [name.strip() for name in names.split(",")] if names else list(known)
    for name in chosen:
        if name not in known:
            raise ConfigError(f"--routers: unknown router {name!r}{did_you_mean(name, tuple(known))}")
        if chosen.count(name) > 1:
            raise ConfigError(f"--routers: {name!r} is named more than once")
    return {name: _maker(known[name]) for name in chosen}


def _maker(entry: Entry[Router]) -> MakeRouter:
    try:
        options = entry.config()
    except TypeError as error:
        raise ConfigError(
            f"--routers: {entry.name!r} has options without defaults, which a bench cannot set"
        ) from error
    return lambda: entry.factory(options, Resources())


def compare(traces: Sequence[Trace], routers: Mapping[str, MakeRouter], num_replicas: int) -> list[dict[str, Any]]:
    """Return one JSON object per trace and router: the `RoutingResult`, and `makespan_ratio` to the trace's best."""
    rows: list[dict[str, Any]] = []
    for trace in traces:
        results = {name: simulate(trace, make(), num_replicas) for name, make in routers.items()}
        best_s = min(result.makespan_s for result in results.values())
        rows += [_row(trace, name, result, best_s) for name, result in results.items()]
    return rows


def _row(trace: Trace, name: str, result: RoutingResult, best_s: float) -> dict[str, Any]:
    return {"trace": trace.name, "router": name, "makespan_ratio": result.makespan_s / best_s, **asdict(result)}


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("trace", "router", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("makespan", "to best", "hits", "balance", "moves"):
        table.add_column(name, justify="right")
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(
            Text(row["trace"]),
            Text(row["router"]),
            f"{row['makespan_s']:.2f} s",
            f"{row['makespan_ratio']:.3f}",
            f"{row['prefix_hit_rate']:.1%}",
            f"{row['balance']:.3f}",
            str(row["num_moves"]),
            end_section=after is not None and after["trace"] != row["trace"],
        )
    return table
