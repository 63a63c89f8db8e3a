"""Compares routers on traces, and prints the table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import asdict
from rich import box
from rich.table import Table
from rich.text import Text

from turnwise.console import Console
from turnwise.errors import ConfigError
from turnwise.plugin.host import load
from turnwise.plugin.registry import Entry, did_you_mean
from turnwise.protocols import Resources, Router
from turnwise.terminal import write_output
from turnwise.types import PluginRecipe
from turnwise_routing_bench.recorded_traces import load_trace
from turnwise_routing_bench.simulator import RoutingResult, simulate
from turnwise_routing_bench.synthetic_traces import synthetic_traces
from turnwise_routing_bench.traces import Trace

MakeRouter = Callable[[], Router]


def run_routing(arguments: argparse.Namespace) -> int:
    """Compare the routers and print the table."""
    if arguments.replicas < 1:
        raise ConfigError(f"--replicas: expected at least 1, got {arguments.replicas}")
    routers = load_routers(arguments.routers)
    traces = [load_trace(path) for path in arguments.trace] or synthetic_traces(arguments.seed, arguments.replicas)
    rows = compare(traces, routers, arguments.replicas)
    if arguments.json:
        head = {"replicas": arguments.replicas, "seed": None if arguments.trace else arguments.seed}
        write_output(json.dumps({**head, "results": rows}, indent=2) + "\n")
    else:
        Console().print(_table(rows))
    return 0


def load_routers(names: str) -> Mapping[str, MakeRouter]:
    """
    Return a factory for each router that is named in a list with commas, with its default options.

    Args:
        names: empty for all registered routers.

    Raises:
        ConfigError: a name is unknown or repeated, or a router has options without defaults.
    """
    known = load(PluginRecipe()).registry("routers").entries()
    chosen = [name.strip() for name in names.split(",")] if names else list(known)
    for name in chosen:
        if name not in known:
            raise ConfigError(f"--routers: unknown router {name!r}{did_you_mean(name, tuple(known))}")
        if chosen.count(name) > 1:
            raise ConfigError(f"--routers: {name!r} is named more than once; name each router once")
    return {name: _maker(known[name]) for name in chosen}


def _maker(entry: Entry[Router]) -> MakeRouter:
    try:
        options = entry.config()
    except TypeError as error:
        raise ConfigError(
            f"--routers: {entry.name!r} has options without defaults, which this command cannot set; leave it out"
        ) from error
    return lambda: entry.factory(options, Resources())


def compare(traces: Sequence[Trace], routers: Mapping[str, MakeRouter], num_replicas: int) -> list[dict[str, Any]]:
    """Return a JSON object per trace and router: the `RoutingResult`, and `makespan_ratio` to the best on the trace."""
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
    for name in ("makespan", "to best", "hits", "balance", "migrations"):
        table.add_column(name, justify="right")
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(
            Text(row["trace"]),
            Text(row["router"]),
            f"{row['makespan_s']:.2f} s",
            f"{row['makespan_ratio']:.3f}",
            f"{row['prefix_hit_rate']:.1%}",
            f"{row['balance']:.3f}",
            str(row["num_migrations"]),
            end_section=after is not None and after["trace"] != row["trace"],
        )
    return table
