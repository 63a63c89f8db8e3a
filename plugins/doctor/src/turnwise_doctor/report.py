"""Reports on this interpreter and on others."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import asdict
from rich.table import Table
from rich.text import Text

from turnwise import load_resolved, plan_placement
from turnwise.config.models import reads_weights
from turnwise.console import Console
from turnwise.errors import ConfigError
from turnwise.models.inspection import inspect_model
from turnwise.plugin.host import load
from turnwise.protocols import Finding
from turnwise.terminal import literal, write_output
from turnwise.types import PluginRecipe
from turnwise_doctor.diagnosis import Diagnosis, diagnose

_TIMEOUT_S: Final = 300.0
_STYLES: Final = {"ok": "green", "missing": "yellow", "limited": "cyan", "broken": "bold red"}
_FAILURES: Final = ("missing", "broken")
Report = dict[str, Any]
"""The diagnoses of one interpreter as JSON values: `python`, `error`, `hint` and `diagnostics`."""


def print_report(arguments: argparse.Namespace) -> int:
    """Print the findings, and return the exit code."""
    config_pythons, models = ([], []) if arguments.config is None else _read_config(arguments.config)
    pythons = [*arguments.python, *config_pythons]
    reports = [diagnose_here(arguments.names)]
    reports[0]["diagnostics"] += models
    reports += [ask(python, arguments.names) for python in dict.fromkeys(pythons) if python != sys.executable]
    if arguments.json:
        write_output(json.dumps({"interpreters": reports}, indent=2) + "\n")
    else:
        for report in reports:
            _print(report)
    return 0 if all(_works(name, reports) for name in arguments.names) else 1


def _read_config(config_file: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the interpreters of the replicas, and a diagnosis of the run's model; empty for a run without them."""
    config, host = load_resolved(config_file, [])
    source = config.model_source()
    pythons = [pool.python for pool in plan_placement(config).pools if pool.python is not None]
    if source is None:
        return pythons, []
    try:
        state = inspect_model(source, weights=reads_weights(host, config.engine))
        finding = Finding("model", "ok" if state.here else "limited", state.text)
    except ConfigError as error:
        finding = Finding("model", "missing", str(error), "give a folder, or the id of a model on the hub")
    return pythons, [asdict(Diagnosis(name="model", plugin="", findings=(finding,)))]


def diagnose_here(names: Sequence[str]) -> Report:
    """Return the report of this interpreter."""
    # Packages may print when they are imported, and standard output belongs to the report.
    with contextlib.redirect_stdout(sys.stderr):
        diagnostics = [asdict(each) for each in diagnose(load(PluginRecipe()), names)]
    return {"python": sys.executable, "error": "", "hint": "", "diagnostics": diagnostics}


def ask(python: str, names: Iterable[str]) -> Report:
    """Return the report of another interpreter; if it cannot be asked, the report has the reason and a hint."""
    program = shutil.which(python)  # with a slash it is a path
    if program is None:
        return _missing(python)
    command = [program, "-m", "turnwise.cli", "doctor", "--json", *names]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return _failure(python, f"it did not answer within {_TIMEOUT_S:g} s", "")
    except OSError as error:
        return _failure(python, f"it cannot be run: {error.strerror}", "")
    try:
        (report,) = json.loads(done.stdout)["interpreters"]
        return {name: report[name] for name in ("error", "hint", "diagnostics")} | {"python": python}
    except (ValueError, KeyError, TypeError):
        return _unanswered(python, done.stderr.decode(errors="replace"))


def _missing(python: str) -> Report:
    if "/" not in python:
        return _failure(python, "there is no such interpreter on the PATH", "give the path of an interpreter")
    folder = Path(python).absolute().parent
    return _failure(
        python, "there is no such interpreter", f"python3 -m venv {folder.parent}" if folder.name == "bin" else ""
    )


def _unanswered(python: str, errors: str) -> Report:
    lines = errors.strip().splitlines()
    if any("No module named" in line and "turnwise" in line for line in lines):
        return _failure(python, "turnwise is not installed there", f"{python} -m pip install turnwise")
    if any("invalid choice: 'doctor'" in line for line in lines):
        return _failure(python, "turnwise-doctor is not installed there", f"{python} -m pip install turnwise-doctor")
    return _failure(python, lines[-1] if lines else "it printed nothing", "")


def _failure(python: str, error: str, hint: str) -> Report:
    return {"python": python, "error": error, "hint": hint, "diagnostics": []}


def _works(name: str, reports: Iterable[Report]) -> bool:
    """Return whether a name works in an interpreter; an engine may work only in the replicas' interpreter."""
    return any(
        diagnostics and all(finding["state"] not in _FAILURES for each in diagnostics for finding in each["findings"])
        for diagnostics in (
            [each for each in report["diagnostics"] if name in (each["name"], each["plugin"])] for report in reports
        )
    )


def _print(report: Report) -> None:
    console = Console()
    if report["error"]:
        console.print(f"{report['python']}: {report['error']}", highlight=False)
        console.print(f"  fix: {report['hint']}" if report["hint"] else "", highlight=False)
        return
    console.print(report["python"], highlight=False)
    table = Table("checked by", "item", "state")
    table.add_column("finding", overflow="fold")
    for each in report["diagnostics"]:
        for index, finding in enumerate(each["findings"]):
            last = index == len(each["findings"]) - 1
            table.add_row("" if index else literal(each["name"]), *_cells(finding), end_section=last)
    console.print(table)


def _cells(finding: dict[str, str]) -> tuple[str, Text, str]:
    state = Text(finding["state"], _STYLES[finding["state"]])
    fix = f"\nfix: {finding['hint']}" if finding["hint"] else ""
    return literal(finding["item"]), state, literal(finding["explanation"] + fix)
