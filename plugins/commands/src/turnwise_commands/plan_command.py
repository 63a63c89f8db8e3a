"""`turnwise plan`: whether a config can run, and where its replicas and workers would go; nothing is started."""

from __future__ import annotations

import argparse


class PlanCommand:
    """Check a run and print its placement; needs neither Ray nor a device."""

    help = "check a config and print where its replicas and workers would go, without starting anything"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = (
            "Examples:\n"
            "  turnwise plan run.yaml\n"
            "  turnwise plan run.yaml runtime=ray runtime.num_replicas=4 runtime.num_workers=8\n"
            "  turnwise plan run.yaml runtime.total_devices=16 engine.tensor_parallel_size=2 --json\n\n"
            "Reads the tasks and builds the parts of the run as `turnwise rollout` does: a config that cannot run is\n"
            "refused with its reason. Engines are not started, and no cluster is asked: devices, models of engines\n"
            "and other interpreters may be on other machines. With --placement-only the machine needs neither the\n"
            "model nor the tasks.\n"
            "Exit codes: 0; 2 for a config that cannot run."
        )
        parser.add_argument("config", help="YAML or TOML file")
        parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="set a value, such as rollout.n=4")
        parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
        parser.add_argument("--placement-only", action="store_true", help="neither read the tasks nor build a part")

    def run(self, arguments: argparse.Namespace) -> int:
        from turnwise_commands.plan_report import print_plan

        return print_plan(arguments)
