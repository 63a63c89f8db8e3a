"""`turnwise bench routing`: routers compared on synthetic and recorded traces, in a simulator."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from attrs import asdict, evolve, frozen
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnwise.cli.exit_codes import OK
from turnwise.config_structure import structure
from turnwise.errors import ConfigError, DataError
from turnwise.host import load
from turnwise.protocols import Resources, Router
from turnwise.registry import Entry, did_you_mean
from turnwise.routing_simulator import ReplicaEvent, RoutingResult, Trace, TraceTrajectory, TraceTurn, simulate
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
            "  turnwise bench routing --trace runs/monday.jsonl --json"
        )
        subjects = parser.add_subparsers(metavar="SUBJECT", required=True)
        routing = subjects.add_parser("routing", help="makespan, prefix hits, balance and moves of each router")
        routing.add_argument(
            "--trace",
            metavar="FILE",
            nargs="+",
            default=[],
            help="recorded traces, JSONL, instead of the synthetic ones",
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


# Recorded traces


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write JSONL: a line per trajectory, in the fields of `TraceTrajectory`, and one per `ReplicaEvent`."""
    rows = [*map(asdict, trace.trajectories), *map(asdict, trace.events)]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def load_trace(path: str | Path) -> Trace:
    """
    Read what `save_trace` wrote, or a recording in that form; a line with `replica` is an event. Named after the file.

    Raises:
        DataError: the file cannot be read, or a line is not as it should be; the text names file and line.
    """
    file = Path(path)
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    rows = [_trace_row(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    trajectories = tuple(row for row in rows if isinstance(row, TraceTrajectory))
    if not trajectories:
        raise DataError(f"{file}: holds no trajectory")
    try:
        events = tuple(row for row in rows if isinstance(row, ReplicaEvent))
        return Trace(name=file.stem, trajectories=trajectories, events=events)
    except ValueError as error:
        raise DataError(f"{file}: {error}") from error


def _trace_row(line: str, where: str) -> TraceTrajectory | ReplicaEvent:
    try:
        row = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: invalid JSON: {error}") from None
    try:
        if isinstance(row, dict) and "replica" in row:
            return structure(row, ReplicaEvent)
        return structure(row, TraceTrajectory)
    except ConfigError as error:
        raise DataError(f"{where}: {'; '.join(str(error).splitlines())}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


# Synthetic traces

_ARRIVALS_S: Final = 12.0


@frozen
class Shape:
    """
    How a synthetic trace is drawn.

    Attributes:
        draw: makes trajectory `index` of `total`.
        events: what happens to replicas meanwhile.
    """

    draw: Callable[[random.Random, int, int], TraceTrajectory]
    events: tuple[ReplicaEvent, ...] = ()


def synthetic_traces(seed: int, num_replicas: int, per_replica: int = 96) -> list[Trace]:
    """
    Return a trace of each of `SHAPES`.

    Args:
        seed: the same gives the same traces.
        num_replicas: that they are meant for.
        per_replica: trajectories for each of these; the default is half as many again as run at once.
    """
    total = num_replicas * per_replica
    traces = []
    for name, shape in SHAPES.items():
        rng = random.Random(f"{name} {seed}")
        drawn = tuple(shape.draw(rng, index, total) for index in range(total))
        traces.append(Trace(name=name, trajectories=drawn, events=shape.events))
    return traces


def _turns(rng: random.Random, num_turns: int, mean_tokens: int, tool_s: float = 0.05) -> tuple[TraceTurn, ...]:
    """Turns within 30 % of a length; behind the last one there is no tool."""
    lengths = [max(1, round(mean_tokens * rng.uniform(0.7, 1.3))) for _ in range(num_turns)]
    between = [TraceTurn(num_new_tokens=n, tool_s=tool_s, num_observation_tokens=50) for n in lengths[:-1]]
    return (*between, TraceTurn(num_new_tokens=lengths[-1]))


def _mixed_turns(rng: random.Random) -> tuple[TraceTurn, ...]:
    return _turns(rng, 8, 400) if rng.random() < 0.1 else _turns(rng, 3, 150)


def _trajectory(index: int, num_prompt_tokens: int, turns: tuple[TraceTurn, ...], **more: Any) -> TraceTrajectory:
    return TraceTrajectory(trajectory_id=f"t{index}", num_prompt_tokens=num_prompt_tokens, turns=turns, **more)


def _uniform(rng: random.Random, index: int, _total: int) -> TraceTrajectory:
    return _trajectory(index, 500, _turns(rng, 4, 200))


def _skewed_lengths(rng: random.Random, index: int, _total: int) -> TraceTrajectory:
    """90 % are 2 turns of 60 tokens, 10 % are 8 turns of 400: 27 times apart."""
    return _trajectory(index, 215, _turns(rng, 8, 400) if rng.random() < 0.1 else _turns(rng, 2, 60))


def _slow_tools(rng: random.Random, index: int, _total: int) -> TraceTrajectory:
    """Tool latency is log-normal with a median of 1 s, cut at 30 s."""
    turns = [
        evolve(turn, tool_s=min(30.0, math.exp(rng.gauss(0, 1.2))) if turn.tool_s else 0.0)
        for turn in _turns(rng, 4, 200)
    ]
    return _trajectory(index, 500, tuple(turns))


def _shared_prompts(rng: random.Random, index: int, _total: int) -> TraceTrajectory:
    """Groups of 16 with one prompt of 4,000 to 12,000 tokens each."""
    group = index // 16
    num_prompt_tokens = 4000 + (group * 2677) % 8001
    return _trajectory(index, num_prompt_tokens, _turns(rng, 3, 150), group_id=f"g{group}")


def _bursts(rng: random.Random, index: int, total: int) -> TraceTrajectory:
    """Eight bursts, 6 s apart, of mixed prompts and lengths."""
    return _trajectory(index, rng.randint(200, 2000), _mixed_turns(rng), arrival_s=index * 8 // total * 6.0)


def _steady_mixed(rng: random.Random, index: int, total: int) -> TraceTrajectory:
    return _trajectory(index, 500, _mixed_turns(rng), arrival_s=_ARRIVALS_S * index / total)


def _steady(rng: random.Random, index: int, total: int) -> TraceTrajectory:
    return _trajectory(index, 500, _turns(rng, 5, 200), arrival_s=_ARRIVALS_S * index / total)


SHAPES: Final[Mapping[str, Shape]] = {
    "uniform": Shape(_uniform),
    "skewed_lengths": Shape(_skewed_lengths),
    "slow_tools": Shape(_slow_tools),
    "shared_prompts": Shape(_shared_prompts),
    "bursts": Shape(_bursts),
    "slow_replica": Shape(_steady_mixed, (ReplicaEvent(at_s=0.0, replica=0, speed=0.4),)),
    "replica_leaves": Shape(
        _steady,
        (ReplicaEvent(at_s=8.0, replica=1, available=False), ReplicaEvent(at_s=20.0, replica=1)),
    ),
}
"""The synthetic traces: one hardship each, and one without any."""
