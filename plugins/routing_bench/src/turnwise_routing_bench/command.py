"""`turnwise bench routing`: compares routers on traces."""

from __future__ import annotations

import argparse


class BenchCommand:
    """Simulates routers; it needs no model and no GPU."""

    help = "compare routers in a simulator"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from turnwise_routing_bench.routing_report import run_routing

        parser.epilog = (
            "Examples:\n  turnwise bench routing\n"
            "  turnwise bench routing --replicas 8 --routers least_tokens,round_robin --seed 1\n"
            "  turnwise bench routing --trace runs/first/trajectories.parquet --replicas 8\n"
            "  turnwise bench routing --trace monday.jsonl --json"
        )
        subjects = parser.add_subparsers(metavar="SUBJECT", required=True)
        routing = subjects.add_parser(
            "routing", help="print makespan, cache hits, balance and migrations of each router"
        )
        routing.set_defaults(run_subject=run_routing)
        routing.add_argument(
            "--trace",
            metavar="FILE",
            nargs="+",
            default=[],
            help="replay these instead of the synthetic traces: results of rollouts (Parquet), or traces (JSONL)",
        )
        routing.add_argument("--replicas", type=int, default=4, metavar="N", help="number of replicas (4)")
        routing.add_argument("--routers", default="", metavar="a,b", help="names of routers; all if left out")
        routing.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the synthetic traces (0)")
        routing.add_argument("--json", action="store_true", help="print JSON instead of a table")

    def run(self, arguments: argparse.Namespace) -> int:
        status: int = arguments.run_subject(arguments)
        return status
