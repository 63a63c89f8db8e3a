"""`turnwise doctor`: asks each plugin whether it works on this machine."""

from __future__ import annotations

import argparse


class DoctorCommand:
    """Prints the findings of the installed plugins."""

    help = "check this machine: what each plugin needs, what is missing, and how to fix it"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = (
            "Examples:\n  turnwise doctor\n  turnwise doctor machine ray\n"
            "  turnwise doctor --python .venv-engine/bin/python\n"
            "  turnwise doctor --config run.yaml --json\n\n"
            "Exit codes: 0; 1 if a NAME is missing or broken in every interpreter; 2 for bad input."
        )
        parser.add_argument("names", nargs="*", metavar="NAME", help="diagnose only these; all if left out")
        parser.add_argument("--python", action="append", default=[], metavar="PATH", help="also ask this interpreter")
        parser.add_argument("--config", metavar="FILE", help="also check the model and the replica_python of this run")
        parser.add_argument("--json", action="store_true", help="print JSON instead of tables")

    def run(self, arguments: argparse.Namespace) -> int:
        from turnwise_doctor.report import print_report

        return print_report(arguments)
