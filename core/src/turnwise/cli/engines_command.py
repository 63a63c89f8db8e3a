"""`turnwise engines doctor`: which engines there are, what works here, and what to do about what does not."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from turnwise.cli.exit_codes import OK
from turnwise.cli.resolved_config import load_resolved

_SURVEY: Final = "turnwise.cli.engine_survey"
_TIMEOUT_S: Final = 180.0
_STYLES: Final = {"ok": "green", "missing": "yellow", "unusable": "dim", "broken": "bold red"}


class EnginesCommand:
    """Ask one interpreter or several what their engines can do."""

    help = "engines: what is installed, what works on this machine, and the command that fixes what does not"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare `doctor [--python PATH ...] [--config FILE] [--json]`."""
        parser.epilog = (
            "Examples:\n  turnwise engines doctor\n  turnwise engines doctor --python .venv-vllm/bin/python\n"
            "  turnwise engines doctor --config examples/calculator.yaml --json"
        )
        parser.add_argument("what", choices=["doctor"], help="what to do")
        parser.add_argument(
            "--python", action="append", default=[], metavar="PATH", help="ask this interpreter as well"
        )
        parser.add_argument("--config", help="ask the replica_python of this run config as well")
        parser.add_argument("--json", action="store_true", help="print JSON instead of tables")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print what each interpreter says."""
        pythons = [sys.executable, *arguments.python]
        if arguments.config:
            config, _host = load_resolved(arguments.config, [])
            replica_python = config.runtime.ray.replica_python
            pythons += [replica_python] if replica_python else []
        surveys = [survey_of(python) for python in dict.fromkeys(pythons)]
        if arguments.json:
            sys.stdout.write(json.dumps({"interpreters": surveys}, indent=2) + "\n")
        else:
            for found in surveys:
                _print(found)
        return OK


def survey_of(python: str) -> dict[str, Any]:
    """Ask an interpreter; what cannot be asked says why, and how to mend it."""
    if not (Path(python).is_file() and os.access(python, os.X_OK)):
        return _unasked(python, "there is no such interpreter", f"python3 -m venv {Path(python).parents[1]}")
    try:
        done = subprocess.run([python, "-m", _SURVEY], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return _unasked(python, f"it did not answer within {_TIMEOUT_S:g} s", "")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        no_turnwise = any("No module named" in line and "turnwise" in line for line in lines)
        reason = "turnwise is not installed there" if no_turnwise else lines[-1] if lines else "it said nothing"
        return _unasked(python, reason, f"{python} -m pip install turnwise" if no_turnwise else "")
    survey: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return survey | {"python": python, "error": "", "fix": ""}


def _unasked(python: str, error: str, fix: str) -> dict[str, Any]:
    return {"python": python, "error": error, "fix": fix, "engines": [], "transports": []}


def _print(survey: dict[str, Any]) -> None:
    console = Console()
    if survey["error"]:
        console.print(f"{survey['python']}: {survey['error']}", markup=False, highlight=False)
        console.print(f"  fix: {survey['fix']}" if survey["fix"] else "", markup=False, highlight=False)
        return
    device = survey["device"]
    where = f"{device['kind']} {', '.join(device['names'])}".strip() + (
        f" ({device['reason']})" if device["reason"] else ""
    )
    title = f"{survey['python']}: Python {survey['python_version']}, turnwise {survey['turnwise']}, device {where}"
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    table = Table("engine", "state", "versions", "sleep", "updates", "remarks")
    for row in survey["engines"]:
        versions = ", ".join(f"{package} {found}" for package, found in row.get("versions", {}).items())
        levels = ", ".join(map(str, row.get("sleep_levels", []))) or "-"
        updates = "yes" if row.get("weight_updates") else "-"
        table.add_row(row["name"], _state(row), versions, levels, updates, _remarks(row))
    console.print(table)
    table = Table("weight transport", "state", "remarks")
    for row in survey["transports"]:
        table.add_row(row["name"], _state(row), _remarks(row))
    console.print(table)


def _state(row: dict[str, Any]) -> str:
    return f"[{_STYLES[row['state']]}]{row['state']}[/]"


def _remarks(row: dict[str, Any]) -> str:
    from rich.markup import escape

    return escape("\n".join(text for text in (row["reason"], f"fix: {row['fix']}" if row["fix"] else "") if text))
